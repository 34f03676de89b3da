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

from qsim.functional.quantizer import is_stochastic
from qsim.nn.product.embedding import FivePointEmbedding, check_table, draws_gradient
from qsim.nn.sharded.scales import shares_of_lookup
from qsim.nn.sharded.shares import (
    Placements,
    agreed_seed,
    draws_of_weight,
    from_shards,
    is_shard,
    placed,
    refuse_shard,
    seed_of_shares,
    summing,
)
from qsim.random.shards import sizes, span
from qsim.random.sources import Stream
from qsim.recipes.five_point import FivePoint


def sharded_embedding(x: Tensor, weight: Tensor, padding_idx: int, scale_grad_by_freq: bool, points: FivePoint, stream: Stream) -> Tensor:
    """`five_point_embedding` of a distributed table.

    Args:
        x: Indices.
        weight: The table.
        padding_idx: The row that gets no gradient, or -1.
        scale_grad_by_freq: Divide gradients by how often an index occurs.
        points: Where to round.
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
    check_table(weight, points)
    along = [_layout(x, weight, *dim) for dim in zip(sizes(x.device_mesh), x.placements, weight.placements, strict=True)]
    of_x, of_weight, of_result, of_gradient = zip(*along, strict=True)
    x, weight = placed(x, of_x), placed(weight, of_weight)
    shares = shares_of_lookup(x, weight, of_result, points) if points.is_scaled else (None, None)
    in_rows = any(is_shard(how, 0) for how in of_weight)
    if in_rows and scale_grad_by_freq:
        raise ValueError("embedding: scale_grad_by_freq cannot be combined with a table that is distributed by rows")
    seed = agreed_seed(weight, stream) if draws_gradient(points) else None
    weight_seed = seed_of_shares(weight, stream, points.redraws_weight) if is_stochastic(points.weight) else None
    rows, draws = weight.to_local(grad_placements=of_gradient), draws_of_weight(weight, of_x, of_result)
    if points.sums[2] is not None:
        draws = replace(draws, sums=summing(weight.device_mesh, (of_result, of_result, of_gradient)))
    indices, (start, _) = x.to_local(), span(weight, 0)
    padding = padding_idx - start if start <= padding_idx < start + rows.shape[0] else -1
    elsewhere = (indices < start) | (indices >= start + rows.shape[0])
    # For rows of other processes any row will do: it is masked out, and its gradient is zero. An accumulator adds no such zeros.
    own = (indices - start).masked_fill(elsewhere, 0 if points.sums[2] is None else -1) if in_rows else indices
    given = (own, rows, seed, weight_seed, points, padding, scale_grad_by_freq, draws, shares)
    y = FivePointEmbedding.apply(*given)  # type: ignore[no-untyped-call]
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
