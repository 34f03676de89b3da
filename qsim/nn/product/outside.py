"""Products of layers with what is rounded around them: operands by callables with gradients of their own, the bias and the result."""

from __future__ import annotations

from torch import Tensor

from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Quantizer
from qsim.nn.product import observers
from qsim.nn.product.autograd import INSTEAD, Raw, are_distributed, product
from qsim.nn.product.plans import ProductPlan
from qsim.nn.product.sites import Site
from qsim.random import seeds, streams
from qsim.random.noise import Noise
from qsim.random.sources import Stream
from qsim.recipes.five_point import FivePoint

#: Streams of the points outside of products.
_STREAMS = {name: streams.stream("five points", name) for name in ("output", "bias")} | {"forward": streams.stream("quantize", "forward")}


def planned(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan, stream: Stream = 0, ends: Tensor | None = None) -> Tensor:
    """A product whose operands are rounded forward and backward.

    Args:
        a: An input.
        w: A weight, or another input.
        bias: Added to the result.
        plan: The plan for such operands.
        stream: Distinguishes weights that have the same values.
        ends: The ends of the groups of rows, in a grouped product.
    """
    if plan.casts is not None:
        of_a, of_w, of_bias = plan.casts
        a, w, bias = a.to(of_a), w.to(of_w), None if bias is None else bias.to(of_bias)
    if not plan.points.wraps:
        return product(a, w, bias, plan, stream, ends)
    if are_distributed(a, w, bias):
        raise ValueError(f"{_first_point(plan.points)} does not take distributed tensors (DTensor): {INSTEAD}")
    split = plan.split
    if split is not None and split.tensor < 2:
        bias = None if bias is None else rounded("bias", bias, plan.points.bias)
        parts = split.parts((a, w)[split.tensor])
        one, other = [(part, w) if split.tensor == 0 else (a, part) for part in parts]
        result = planned(*one, bias, split.rounded, stream, ends) + planned(*other, None, split.rest, stream, ends)
    else:
        a, w, raw = _operands(a, w, plan)
        bias = None if bias is None else rounded("bias", bias, plan.points.bias)
        result = product(a, w, bias, plan, stream, ends, raw)
    return rounded("output", result, plan.points.output)


def _operands(a: Tensor, w: Tensor, plan: ProductPlan) -> tuple[Tensor, Tensor, Raw]:
    """The operands of a product, rounded where that is before it, and as they were."""
    observer = observers.current()
    raw: list[Tensor | None] = [None, None]
    found = [a, w]
    for i, operand in enumerate((plan.first, plan.second)):
        site = operand.forward
        if site.is_outside and site.call is not None:
            raw[i], found[i] = found[i].detach(), site.with_gradient(site.call, found[i])
            if observer is not None:
                observer.rounds(site, found[i].detach(), None, found[i].detach())
    return found[0], found[1], (raw[0], raw[1])


def _first_point(points: FivePoint) -> str:
    """The first point that is called outside of a product, and what it is, for errors."""
    for name in ("act", "weight"):
        point = getattr(points, name)
        if isinstance(point, CallablePoint) and not point.is_straight:
            return f"{name}: {point.name}, with a gradient of its own,"
    return f"the point {'output' if points.output is not None else 'bias'}"


def rounded(name: str, x: Tensor, point: Quantizer | CallablePoint | None) -> Tensor:
    """A tensor rounded at a point, such as a bias or a result."""
    if point is None:
        return x
    if isinstance(point, CallablePoint):
        result = point.with_gradient(name, x)
        seed, site = None, Site(name, None, 0, call=point)
    else:
        # The seed and the stream that the quantizer itself would use.
        stream = streams.rank_stream(_STREAMS[name])
        seed = seeds.seed_tensor(None, None, x.device) if point.rounding.is_stochastic else None
        result, site = point(x, seed=Noise(seed, stream)), Site(name, point, stream)
    observer = observers.current()
    if observer is not None:
        observer.rounds(site, x.detach(), seed, result.detach() if site.call is not None else None)
    return result
