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

Scales are those of the whole: see `qsim.nn.sharded.scales`.

An accumulator adds what a process multiplies: where the whole sum is `Partial()`, every process's part of it, in the order of its shard and
rounded to the layer's dtype. Torch's all-reduce adds these parts in that dtype, float32 in a layer of float32.

An input that is placed otherwise is redistributed first. Layers whose weight is a plain tensor, as with FSDP2 and DDP, do not use this
module. So a layer outside of a tensor-parallel plan whose plain input is replicated on all ranks of the group rounds it with different
noise on each rank; `torch.distributed.tensor.distribute_module` makes its parameters and its input `Replicate()`, and then all ranks round
identically.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from qsim.nn.product.autograd import product_with_seeds
from qsim.nn.product.bilinear import LinearProduct, MatmulProduct
from qsim.nn.product.embedding import Lookup
from qsim.nn.product.plans import ProductPlan, plan_for
from qsim.nn.sharded import embedding
from qsim.nn.sharded.scales import result_shape, shares_of
from qsim.nn.sharded.shares import (
    Placements,
    agreed_seed,
    first_holder,
    from_shards,
    is_shard,
    placed,
    refuse_shard,
    seed_of_shares,
    shards_of_weight,
)
from qsim.random.places import WHOLE
from qsim.random.shards import sizes
from qsim.random.sources import Stream


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
    mesh, two_inputs, product, elsewhere = w.device_mesh, plan.two_inputs, plan.product, None
    of_a, of_w, out, grad_a, grad_w, of_bias, grad_bias = _layout(a, w, plan)
    a, w = placed(a, of_a), placed(w, of_w)
    seed = agreed_seed(w, stream) if plan.draws else None
    weight_seed = seed_of_shares(w, stream, plan.points.redraws_weight) if plan.weight_draws else None
    shards = shards_of_weight(w, of_a, out, (out, grad_a, grad_w))
    if two_inputs:
        shards = replace(shards, ranks=(shards.ranks[0], first_holder(mesh, of_w), shards.ranks[2]), place=WHOLE, adds_bias=True)
    if plan.points.is_scaled or any(site.call is not None for site in plan.sites):
        shards = replace(shards, shared=shares_of(a, w, out, plan))
    own_a, own_w = a.to_local(grad_placements=grad_a), w.to_local(grad_placements=grad_w)
    own_bias = None if bias is None else placed(bias, of_bias).to_local(grad_placements=grad_bias)
    if isinstance(product, Lookup) and any(is_shard(how, 0) for how in of_w):
        product, own_a, elsewhere = embedding.of_rows(product, own_a, w, adds=plan.points.sums[2] is not None)
    own = plan_for(plan.points, product, own_a, own_w, own_bias, two_inputs=two_inputs, shards=shards)
    assert own is not None  # there is something to round
    y = product_with_seeds(own_a, own_w, own_bias, seed, weight_seed, own)
    return from_shards(result_shape(a, w, plan), y if elsewhere is None else y.masked_fill(elsewhere.unsqueeze(-1), 0), mesh, out)


def _on_one_mesh(a: Tensor, w: Tensor, bias: Tensor | None, what: str) -> tuple[DTensor, DTensor, DTensor | None]:
    if not isinstance(a, DTensor) or not isinstance(w, DTensor) or not (bias is None or isinstance(bias, DTensor)):
        kinds = ", ".join(type(x).__name__ for x in (a, w, bias) if x is not None)
        raise TypeError(f"{what} must be all distributed tensors or none, got {kinds}")
    meshes = [x.device_mesh for x in (a, w, bias) if x is not None]
    if any(mesh != meshes[0] for mesh in meshes):
        raise ValueError(f"{what} must live on one mesh, got {', '.join(map(str, meshes))}")
    return a, w, bias


def _layout(a: DTensor, w: DTensor, plan: ProductPlan) -> tuple[Placements, ...]:
    """The placements of both operands, the result, their gradients, the bias and its gradient, chosen for each dimension of the mesh."""
    pairs = zip(a.placements, w.placements, strict=True)
    if plan.product.is_lookup:
        along = [embedding.layout(a, w, *pair, size) for pair, size in zip(pairs, sizes(w.device_mesh), strict=True)]
    else:
        choose = (
            _linear if isinstance(plan.product, LinearProduct) else _matmul if isinstance(plan.product, MatmulProduct) else _convolution
        )
        along = [choose(a, w, *pair) for pair in pairs]
    return tuple(zip(*along, strict=True))


def _linear(a: DTensor, w: DTensor, of_a: Placement, of_w: Placement) -> Placements:
    last = Shard(a.dim() - 1)
    if is_shard(of_w, 0):
        return Replicate(), of_w, last, Partial(), of_w, of_w, of_w
    if is_shard(of_w, 1):
        return last, of_w, Partial(), last, of_w, Replicate(), Replicate()
    refuse_shard("linear: a weight must be placed Shard(0), Shard(1) or Replicate()", of_w)
    return _data_parallel(of_a) if type(of_a) is Shard and of_a != last else _replicated()


def _convolution(a: DTensor, w: DTensor, of_a: Placement, of_w: Placement) -> Placements:
    refuse_shard("convolution: a weight must be placed Replicate()", of_w)
    return _data_parallel(of_a) if is_shard(of_a, 0) else _replicated()


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
