"""Products of distributed tensors: every process multiplies its shards, and rounds them as the whole would be rounded.

Tensors replicated on a mesh are rounded identically on all of its processes: their noise belongs to the mesh, not to the process. A weight
sharded along its first dimension is rounded like the whole weight, bit for bit, because noise is keyed on the index in the whole. Otherwise
a shard has its own random bits: a weight's follow from its position in the mesh, so that replicas of the mesh agree, those of inputs and
gradients from the first process that holds the shard. Nearest rounding always equals that of the whole.

The weight's placement determines the product of a linear layer, as in tensor-parallel plans:

| weight | input | result |
|---|---|---|
| `Shard(0)` | `Replicate()` | `Shard(-1)` |
| `Shard(1)` | `Shard(-1)` | `Partial()` |
| `Replicate()` | `Replicate()`, or `Shard` of any dimension but the last | as the input |

A lookup copies rows of a table:

| table | indices | result |
|---|---|---|
| `Shard(0)`: rows | `Replicate()` | `Partial()` |
| `Shard(1)`: columns | `Replicate()` | `Shard(-1)` |
| `Replicate()` | `Replicate()`, or `Shard` of any dimension | as the indices |

Scales are those of the whole: see `qsim.nn.sharded.scales`.

An accumulator adds what a process multiplies: where the whole sum is `Partial()`, every process's part of it, in the order of its shard and
rounded to the layer's dtype. Torch's all-reduce adds these parts in that dtype, float32 in a layer of float32.

An input that is placed otherwise is redistributed first. Layers whose weight is a plain tensor, as with FSDP2 and DDP, do not use this
module. So a layer outside of a tensor-parallel plan whose plain input is replicated on all ranks of the group rounds it with different
noise on each rank; `torch.distributed.tensor.distribute_module` makes its parameters and its input `Replicate()`, and then all ranks round
identically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from qsim.nn.product.arithmetic import Arithmetic
from qsim.nn.product.autograd import product_with_seeds
from qsim.nn.product.bilinear import LinearProduct, MatmulProduct
from qsim.nn.product.embedding import Lookup
from qsim.nn.product.plans import ProductPlan, plan_for
from qsim.nn.product.tensors import OperandShards
from qsim.nn.sharded.scales import Placements, shares_of
from qsim.random import seeds
from qsim.random.places import WHOLE
from qsim.random.shards import coordinates, place_of, sizes, span
from qsim.random.sources import Stream
from qsim_kernels.ops.direct import DISPATCHED


def sharded_product(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan, stream: Stream = 0) -> Tensor:
    """A product of distributed tensors.

    Args:
        a: An input.
        w: A weight, or another input.
        bias: Added to the result, not rounded.
        plan: The plan for such operands.
        stream: Distinguishes weights that have the same values.

    Raises:
        TypeError: If some operands are distributed tensors and some are not.
        ValueError: If they are on different meshes, or have placements that no product supports.
    """
    a, w, bias = _on_one_mesh(a, w, bias, "embedding: the indices and the table" if plan.product.is_lookup else "the operands of a product")
    product, elsewhere = plan.product, None
    of_a, of_w, out, grad_a, grad_w, of_bias, grad_bias = _layout(a, w, plan)
    a, w = _placed(a, of_a), _placed(w, of_w)
    shape = _result_shape(a, w, plan)
    seed = agreed_seed(w, stream) if plan.draws else None
    weight_seed = seed_of_shares(w, stream, plan.points.redraws_weight) if plan.weight_draws else None
    shards = _shards(w, of_a, of_w, (out, grad_a, grad_w), two_inputs=plan.two_inputs)
    if plan.points.is_scaled or any(site.call is not None for site in plan.sites):
        shards = replace(shards, shared=shares_of(a, w, shape, out, plan))
    own_a, own_w = a.to_local(grad_placements=grad_a), w.to_local(grad_placements=grad_w)
    own_bias = None if bias is None else _placed(bias, of_bias).to_local(grad_placements=grad_bias)
    if isinstance(product, Lookup) and any(_is_shard(how, 0) for how in of_w):
        product, own_a, elsewhere = _of_rows(product, own_a, w, adds=plan.points.sums[2] is not None)
    own = plan_for(plan.points, product, own_a, own_w, own_bias, two_inputs=plan.two_inputs, shards=shards)
    assert own is not None  # there is something to round
    y = product_with_seeds(own_a, own_w, own_bias, seed, weight_seed, own)
    y = y if elsewhere is None else y.masked_fill(elsewhere.unsqueeze(-1), 0)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, w.device_mesh, out, run_check=False, shape=shape, stride=strides)


def _on_one_mesh(a: Tensor, w: Tensor, bias: Tensor | None, what: str) -> tuple[DTensor, DTensor, DTensor | None]:
    if not isinstance(a, DTensor) or not isinstance(w, DTensor) or not (bias is None or isinstance(bias, DTensor)):
        kinds = ", ".join(type(x).__name__ for x in (a, w, bias) if x is not None)
        raise TypeError(f"{what} must be all distributed tensors or none, got {kinds}")
    meshes = [x.device_mesh for x in (a, w, bias) if x is not None]
    if any(mesh != meshes[0] for mesh in meshes):
        raise ValueError(f"{what} must live on one mesh, got {', '.join(map(str, meshes))}")
    return a, w, bias


def _placed(x: DTensor, how: Placements) -> DTensor:
    """A tensor redistributed to given placements."""
    return x if tuple(x.placements) == how else x.redistribute(x.device_mesh, how)


def _result_shape(a: DTensor, w: DTensor, plan: ProductPlan) -> torch.Size:
    """The shape of the whole result, which torch knows without computing it."""
    first, second = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (a, w))
    return plan.product.forward(first, second, None, Arithmetic(second.dtype, DISPATCHED)).shape


def _shards(w: DTensor, of_a: Placements, of_w: Placements, results: Sequence[Placements], *, two_inputs: bool) -> OperandShards:
    """This process's shards of two operands and the result, given the placements of the results of the three products."""
    mesh, out = w.device_mesh, results[0]
    ranks = first_holder(mesh, of_a), first_holder(mesh, of_w) if two_inputs else 0, first_holder(mesh, out)
    # Of shards of the result, or summands of it.
    forward, grad_a, grad_w = (first_holder(mesh, [Shard(0) if how.is_partial() else how for how in each]) for each in results)
    is_other_summand = any(place for place, how in zip(coordinates(mesh), out, strict=True) if how.is_partial())
    place = WHOLE if two_inputs else place_of(w)
    return OperandShards(ranks, (forward, grad_a, grad_w), place, two_inputs or not is_other_summand)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def first_holder(mesh: DeviceMesh, placements: Sequence[Placement]) -> int:
    """The first of the processes that hold the same shard as this one."""
    index = tuple(place if how.is_shard() else 0 for place, how in zip(coordinates(mesh), placements, strict=True))
    return int(mesh.mesh[index])


def agreed_seed(a: DTensor, stream: Stream) -> Tensor:
    """A seed shared by the processes of the mesh: their own draw if they are seeded alike, else the largest one."""
    mesh, local = a.device_mesh, a.to_local()
    drawn = seeds.drawn(local.device, stream_number=stream).to(local.device, non_blocking=True)
    return DTensor.from_local(drawn, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()


def seed_of_shares(w: DTensor, stream: Stream, redraws: bool = False) -> Tensor:
    """`seeds.weight_seed` of the whole weight, from the sums of its shards."""
    summands = [Partial() if how.is_shard() else Replicate() for how in w.placements]
    seed = seeds.weight_seed(w.to_local().detach(), stream, place_of(w), redraws=redraws)
    return DTensor.from_local(seed, w.device_mesh, summands, run_check=False).full_tensor()


def _layout(a: DTensor, w: DTensor, plan: ProductPlan) -> tuple[Placements, ...]:
    """The placements of both operands, the result, their gradients, the bias and its gradient, chosen for each dimension of the mesh."""
    pairs = zip(a.placements, w.placements, strict=True)
    if plan.product.is_lookup:
        along = [_lookup(a, w, *pair, size) for pair, size in zip(pairs, sizes(w.device_mesh), strict=True)]
    else:
        choose = (
            _linear if isinstance(plan.product, LinearProduct) else _matmul if isinstance(plan.product, MatmulProduct) else _convolution
        )
        along = [choose(a, w, *pair) for pair in pairs]
    return tuple(zip(*along, strict=True))


def _linear(a: DTensor, w: DTensor, of_a: Placement, of_w: Placement) -> Placements:
    last = Shard(a.dim() - 1)
    if _is_shard(of_w, 0):
        return Replicate(), of_w, last, Partial(), of_w, of_w, of_w
    if _is_shard(of_w, 1):
        return last, of_w, Partial(), last, of_w, Replicate(), Replicate()
    _refuse_shard("linear: a weight must be placed Shard(0), Shard(1) or Replicate()", of_w)
    return _data_parallel(of_a) if type(of_a) is Shard and of_a != last else _replicated()


def _convolution(a: DTensor, w: DTensor, of_a: Placement, of_w: Placement) -> Placements:
    _refuse_shard("convolution: a weight must be placed Replicate()", of_w)
    return _data_parallel(of_a) if _is_shard(of_a, 0) else _replicated()


def _matmul(a: DTensor, b: DTensor, of_a: Placement, of_b: Placement) -> Placements:
    """Keep batches in place if both operands are sharded in the same way."""
    if isinstance(of_a, Shard) and isinstance(of_b, Shard):
        from_last = of_a.dim - a.dim()
        if from_last < -2 and from_last == of_b.dim - b.dim() and a.shape[of_a.dim] == b.shape[of_b.dim]:
            return of_a, of_b, Shard(max(a.dim(), b.dim()) + from_last), of_a, of_b, Replicate(), Replicate()
    return _replicated()


def _data_parallel(of_a: Placement) -> Placements:
    return of_a, Replicate(), of_a, of_a, Partial(), Replicate(), Partial()


def _replicated() -> Placements:
    return (Replicate(),) * 7


def _lookup(x: DTensor, weight: DTensor, of_x: Placement, of_weight: Placement, size: int) -> Placements:
    """The placements along one dimension of the mesh, which has a size; a lookup has no bias."""
    rows, none = weight.shape[0], Replicate()
    if _is_shard(of_weight, 0):
        if (size - 1) * -(-rows // size) >= rows:
            raise ValueError(f"embedding: a table of {rows} rows leaves some of {size} processes none")
        return Replicate(), of_weight, Partial(), Partial(), of_weight, none, none
    if _is_shard(of_weight, 1):
        return Replicate(), of_weight, Shard(x.dim()), Shard(x.dim()), of_weight, none, none
    _refuse_shard("embedding: a table must be placed Shard(0), Shard(1) or Replicate()", of_weight)
    return (of_x, none, of_x, of_x, Partial(), none, none) if type(of_x) is Shard else (none,) * 7


def _is_shard(placement: Placement, dim: int) -> bool:
    """Whether a tensor is sharded along a dimension, with shards of consecutive rows."""
    return type(placement) is Shard and placement.dim == dim


def _refuse_shard(rule: str, placement: Placement) -> None:
    """Raise an error for an unsupported placement; the message states the rule."""
    if not placement.is_replicate() and not placement.is_partial():
        raise ValueError(f"{rule}, got {placement}")


def _of_rows(lookup: Lookup, indices: Tensor, weight: DTensor, *, adds: bool) -> tuple[Lookup, Tensor, Tensor]:
    """A lookup in a process's rows of a table, the indices in these, and where indices are those of other processes' rows.

    Args:
        lookup: The lookup in the whole table.
        indices: The indices there.
        weight: The table.
        adds: Whether an accumulator adds the table's gradient.
    """
    if lookup.scale_grad_by_freq:
        raise ValueError("embedding: scale_grad_by_freq cannot be combined with a table that is distributed by rows")
    start, rows = span(weight, 0)[0], len(weight.to_local())
    elsewhere = (indices < start) | (indices >= start + rows)
    padding = lookup.padding_idx - start if start <= lookup.padding_idx < start + rows else -1
    # For rows of other processes any row will do: it is masked out, and its gradient is zero. An accumulator adds no such zeros.
    return Lookup(padding, skips_negative=adds), (indices - start).masked_fill(elsewhere, -1 if adds else 0), elsewhere
