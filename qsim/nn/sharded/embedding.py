"""Lookups in distributed tables: every process looks up its shard. Noise is as in `qsim.nn.sharded`.

| table | indices | result |
|---|---|---|
| `Shard(0)`: rows | `Replicate()` | `Partial()` |
| `Shard(1)`: columns | `Replicate()` | `Shard(-1)` |
| `Replicate()` | `Replicate()`, or `Shard` of any dimension | as the indices |
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from qsim.nn.product.autograd import product_with_seeds
from qsim.nn.product.embedding import Lookup
from qsim.nn.product.plans import ProductPlan, plan_for
from qsim.nn.sharded.scales import shares_of_lookup
from qsim.nn.sharded.shares import (
    Placements,
    agreed_seed,
    from_shards,
    is_shard,
    placed,
    refuse_shard,
    seed_of_shares,
    shards_of_weight,
)
from qsim.random.shards import sizes, span
from qsim.random.sources import Stream


def sharded_lookup(x: Tensor, weight: Tensor, plan: ProductPlan, stream: Stream) -> Tensor:
    """A lookup in a distributed table.

    Args:
        x: Indices.
        weight: The table.
        plan: The plan of a lookup.
        stream: Distinguishes weights that have the same values.

    Raises:
        TypeError: If the indices or the table are not distributed tensors.
        ValueError: If they are on different meshes, or have placements that no lookup supports.
    """
    if not isinstance(x, DTensor) or not isinstance(weight, DTensor):
        kinds = f"{type(x).__name__} and {type(weight).__name__}"
        raise TypeError(f"embedding: indices and table must both be distributed tensors or none, got {kinds}")
    if x.device_mesh != weight.device_mesh:
        raise ValueError(f"embedding: indices and table must live on one mesh, got {x.device_mesh} and {weight.device_mesh}")
    along = [_layout(x, weight, *dim) for dim in zip(sizes(x.device_mesh), x.placements, weight.placements, strict=True)]
    of_x, of_weight, of_result, of_gradient = zip(*along, strict=True)
    x, weight = placed(x, of_x), placed(weight, of_weight)
    points, product = plan.points, plan.product
    assert isinstance(product, Lookup)
    shards = shards_of_weight(weight, of_x, of_result, (of_result, of_result, of_gradient))
    if points.is_scaled:
        table, result = shares_of_lookup(x, weight, of_result, plan)
        shards = replace(shards, shared=(None, table, result))
    in_rows, adds = any(is_shard(how, 0) for how in of_weight), points.sums[2] is not None
    if in_rows and product.scale_grad_by_freq:
        raise ValueError("embedding: scale_grad_by_freq cannot be combined with a table that is distributed by rows")
    seed = agreed_seed(weight, stream) if plan.draws else None
    weight_seed = seed_of_shares(weight, stream, points.redraws_weight) if plan.weight_draws else None
    rows = weight.to_local(grad_placements=of_gradient)
    indices, (start, _) = x.to_local(), span(weight, 0)
    padding = product.padding_idx - start if start <= product.padding_idx < start + rows.shape[0] else -1
    elsewhere = (indices < start) | (indices >= start + rows.shape[0])
    # For rows of other processes any row will do: it is masked out, and its gradient is zero. An accumulator adds no such zeros.
    own = (indices - start).masked_fill(elsewhere, -1 if adds else 0) if in_rows else indices
    lookup = Lookup(padding, product.scale_grad_by_freq, skips_negative=in_rows and adds)
    own_plan = plan_for(points, lookup, own, rows, shards=shards)
    assert own_plan is not None  # there is something to round
    y = product_with_seeds(own, rows, None, seed, weight_seed, own_plan)
    y = y.masked_fill(elsewhere.unsqueeze(-1), 0) if in_rows else y
    return from_shards((*x.shape, weight.shape[1]), y, x.device_mesh, of_result)


def _layout(x: DTensor, weight: DTensor, size: int, of_x: Placement, of_weight: Placement) -> Placements:
    """The placements of the indices, the table, the result and the table's gradient along one dimension of the mesh."""
    rows = weight.shape[0]
    if is_shard(of_weight, 0):
        if (size - 1) * -(-rows // size) >= rows:
            raise ValueError(f"embedding: a table of {rows} rows leaves some of {size} processes none")
        return Replicate(), of_weight, Partial(), of_weight
    if is_shard(of_weight, 1):
        return Replicate(), of_weight, Shard(x.dim()), of_weight
    refuse_shard("embedding: a table must be placed Shard(0), Shard(1) or Replicate()", of_weight)
    return (of_x, Replicate(), of_x, Partial()) if type(of_x) is Shard else (Replicate(),) * 4
