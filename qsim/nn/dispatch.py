"""Products of whole tensors or of distributed ones, of plain code or under the transforms of `torch.func`."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Quantizer
from qsim.nn.product import observers
from qsim.nn.product.autograd import planned_product
from qsim.nn.product.functorch import transformed_product
from qsim.nn.product.plans import ProductPlan, SplitProduct
from qsim.nn.product.sites import Site
from qsim.random import seeds, streams
from qsim.random.noise import Noise
from qsim.random.sources import Stream
from qsim_kernels.ops.direct import DISPATCHED

_WHOLE = (Tensor, nn.Parameter)


def planned(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan, stream: Stream = 0, ends: Tensor | None = None) -> Tensor:
    """The product of a plan; see `planned_product`."""
    if plan.casts is not None:
        a, w, bias = plan.cast(a, w, bias)
    if plan.points.wraps:
        return _wrapped(a, w, bias, plan, stream, ends)
    return planned_product(a, w, bias, plan, stream, ends) if plan.ops is not DISPATCHED else _product(a, w, bias, plan, stream, ends)


def _wrapped(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan, stream: Stream, ends: Tensor | None) -> Tensor:
    """The product, with what is rounded in autograd before and after it: callables with gradients of their own, the bias and the result."""
    if is_distributed(a, w, bias):
        raise ValueError(
            "the points output and bias, and callables with a gradient of their own, do not take distributed tensors (DTensor)"
        )
    used, observer = plan.points.used, observers.current()
    bias = None if bias is None else _rounded("bias", used["bias"], bias, observer)
    if plan.split is not None and plan.split.tensor < 2:
        result = _split_product([a, w], bias, plan.split, stream, ends)
    else:
        result = _product_of_called([a, w], bias, plan, stream, ends, observer)
    return _rounded("output", used["output"], result, observer)


def _split_product(operands: list[Tensor], bias: Tensor | None, split: SplitProduct, stream: Stream, ends: Tensor | None) -> Tensor:
    """The product of what is rounded of an operand, and that of its outliers."""
    results: list[Tensor] = []
    for part, plan in zip(split.parts(operands[split.tensor]), (split.rounded, split.rest), strict=True):
        a, w = (part if i == split.tensor else operand for i, operand in enumerate(operands))
        results.append(planned(a, w, None if results else bias, plan, stream, ends))
    return results[0] + results[1]


def _product_of_called(
    operands: list[Tensor],
    bias: Tensor | None,
    plan: ProductPlan,
    stream: Stream,
    ends: Tensor | None,
    observer: observers.Observer | None,
) -> Tensor:
    """The product of operands, some of which are rounded by callables with gradients of their own."""
    raw: list[Tensor | None] = [None, None]
    for i, operand in enumerate((plan.first, plan.second)):
        site = operand.forward
        if site.is_outside and site.call is not None:
            raw[i], operands[i] = operands[i].detach(), site.call.with_gradient(site.name, operands[i])
            if observer is not None:
                observer.rounds(site, operands[i].detach(), None, operands[i].detach())
    return _product(operands[0], operands[1], bias, plan, stream, ends, (raw[0], raw[1]))


#: Streams of the points outside of products.
_STREAMS = {name: streams.stream("five points", name) for name in ("output", "bias")}


def _rounded(name: str, point: Quantizer | CallablePoint | None, x: Tensor, observer: observers.Observer | None) -> Tensor:
    """A tensor rounded in autograd."""
    if point is None:
        return x
    if isinstance(point, CallablePoint):
        result = point.with_gradient(name, x)
        seed, site = None, Site(name, None, 0, call=point)
    else:
        stream = streams.rank_stream(_STREAMS[name])
        seed = seeds.seed_tensor(None, None, x.device) if point.rounding.is_stochastic else None
        result, site = point(x, seed=Noise(seed, stream)), Site(name, point, stream)
    if observer is not None:
        observer.rounds(site, x.detach(), seed, result.detach() if site.call is not None else None)
    return result


def _product(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: ProductPlan,
    stream: Stream,
    ends: Tensor | None,
    raw: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    if plan.ops is DISPATCHED:
        if is_distributed(a, w, bias):
            if plan.split is not None:
                raise ValueError("grad: Outliers would get the shard of a distributed tensor: give a format or a Quantizer")
            from qsim.nn.sharded.embedding import sharded_lookup
            from qsim.nn.sharded.product import sharded_product

            return sharded_lookup(a, w, plan, stream) if plan.product.is_lookup else sharded_product(a, w, bias, plan, stream)
        if torch._C._are_functorch_transforms_active():
            return transformed_product(a, w, bias, plan)
    return planned_product(a, w, bias, plan, stream, ends, raw)


def is_distributed(a: Tensor, w: Tensor, bias: Tensor | None = None) -> bool:
    """Whether one of the operands is a distributed tensor, which exist only in distributed runs."""
    if type(a) in _WHOLE and type(w) in _WHOLE and (bias is None or type(bias) in _WHOLE):
        return False
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor  # imports much of torch.distributed

    return any(isinstance(x, DTensor) for x in (a, w, bias))
