"""Points with only one that rounds, and points of layers during a measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.nn.histories import with_history
from qsim.recipes.five_point import POINTS, FivePoint
from qsim.scaling import Delayed

#: The six points, in the order of Algorithms 1 and 2.
NAMES = POINTS


def alone(points: FivePoint, name: str) -> FivePoint:
    """Return points of which only the named one rounds.

    A backward point that is `"same"` rounds like the forward point, with its own random bits. Transformed operands stay transformed,
    and are rounded to fp32 instead, because the two transforms of a product must cancel. Likewise the product that gives ∇A keeps its
    gradient in fp32 if only `grad_w` rounds, and the other one if only `grad` does. Sums are
    torch's: an accumulator belongs to no single point.

    Example:
        >>> import qsim
        >>> points = qsim.FivePoint(act="e4m3", weight="e4m3", act_bwd="same", grad="e5m2")
        >>> print(alone(points, "act_bwd"), alone(points, "grad"), sep="; ")
        act_bwd=e4m3; grad=e5m2
    """
    given = {point: quantizer_of(points, point) for point in NAMES}
    kept: dict[str, Any] = {}
    for point, quantizer in given.items():
        needed = quantizer is not None and (quantizer.transform is not None or (points.grad_w is not None and point in ("grad", "grad_w")))
        kept[point] = quantizer if point == name else _exact(quantizer.transform) if quantizer is not None and needed else None
    return FivePoint(**kept)


def quantizer_of(points: FivePoint, name: str) -> Quantizer | None:
    """The quantizer of a point; for `"same"`, that of the forward pass."""
    used = points.used[name]
    return used if isinstance(used, Quantizer) else None


def _exact(transform: Hadamard | None) -> Quantizer:
    """A quantizer that leaves float32 unchanged."""
    return Quantizer("fp32", overflow="nonfinite", transform=transform)


def in_use(module: nn.Module, own: FivePoint, points: FivePoint, prefix: str = "") -> FivePoint:
    """Points for a module whose delayed scales are fixed at the values that its histories give.

    Args:
        module: A layer, or a module whose own products are rounded.
        own: Its points.
        points: Those that it gets.
        prefix: How the names of histories begin.

    Raises:
        ValueError: If a point has a delayed scale and the module has no history for it.
    """
    found: dict[str, Any] = {}
    for name in NAMES:
        point = getattr(points, name)
        if isinstance(point, Quantizer) and isinstance(point.scale, Delayed):
            # A point that was the same as the forward point shares its history.
            shared = getattr(own, name) == "same"
            found[name] = with_history(module, prefix + (name.removesuffix("_bwd") if shared else name), point)
    return replace(points, **found) if found else points
