"""Rounding in autograd outside of a product: operands by callables with gradients of their own, the bias and the result."""

from __future__ import annotations

from torch import Tensor

from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Quantizer
from qsim.nn.product import observers
from qsim.nn.product.plans import ProductPlan
from qsim.nn.product.sites import Site
from qsim.random import seeds, streams
from qsim.random.noise import Noise
from qsim.recipes.five_point import FivePoint

#: The operands before callables outside of the product rounded them; `None` for others.
Raw = tuple[Tensor | None, Tensor | None]
#: Streams of the points outside of products.
_STREAMS = {name: streams.stream("five points", name) for name in ("output", "bias")} | {"forward": streams.stream("quantize", "forward")}


def operands(a: Tensor, w: Tensor, plan: ProductPlan) -> tuple[Tensor, Tensor, Raw]:
    """The operands of a product, rounded where that is before it, and as they were."""
    observer = observers.current()
    raw: list[Tensor | None] = [None, None]
    found = [a, w]
    for i, operand in enumerate((plan.first, plan.second)):
        site = operand.forward
        if site.is_outside and site.call is not None:
            before = raw[i] = found[i].detach()
            found[i] = site.with_gradient(site.call, found[i])
            if observer is not None:
                observer.rounds(site, before, None, found[i].detach())
    return found[0], found[1], (raw[0], raw[1])


def first_point(points: FivePoint) -> str:
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
        seed = seeds.seed_tensor(None, None, x.device) if point.spelt.is_stochastic else None
        result, site = point(x, seed=Noise(seed, stream)), Site(name, point, stream)
    observer = observers.current()
    if observer is not None:
        observer.rounds(site, x.detach(), seed, result.detach() if site.call is not None else None)
    return result
