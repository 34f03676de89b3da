"""Points whose outliers are apart: the points of the two products that replace one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from qsim.functional.callables import CallablePoint
from qsim.points.outliers import Outliers

if TYPE_CHECKING:
    from qsim.recipes.five_point import FivePoint


class PointsOfParts(NamedTuple):
    """The points of two products in place of one: a tensor is the sum of a part that is rounded and of its outliers.

    Attributes:
        tensor: Which tensor it is: 0 for the first operand, 1 for the second, 2 for the gradient of the result.
        parts: Returns what is rounded and the rest.
        rounded: The points of the product of what is rounded.
        rest: Those of the product of the rest, which is not rounded there, and added in float32.
    """

    tensor: int
    parts: Callable[[Tensor], tuple[Tensor, Tensor]]
    rounded: FivePoint
    rest: FivePoint


def parts_of(points: FivePoint) -> tuple[PointsOfParts, ...]:
    """The tensors whose outliers are apart.

    Where the backward pass rounds the operand at a point of its own, one product takes the sum of the parts.
    """
    found = []
    for tensor, name in enumerate(("act", "weight", "grad")):
        point = getattr(points, name)
        if not isinstance(point, CallablePoint) or not isinstance(point.function, Outliers) or point.gradient != "own":
            continue
        is_gradient = name == "grad"
        if points.grad_w is not None if is_gradient else getattr(points, f"{name}_bwd") != "same":
            continue
        # What is rounded outside of a product is rounded once.
        own: dict[str, Any] = {} if is_gradient else {"output": None, "bias": None}
        if is_gradient and points.chip == "require":
            raise ValueError("grad: Outliers are added to products in float32, which no chip does: give chip='auto' or 'never'")
        chip = "never" if is_gradient and points.accumulate is not None else points.chip
        rounded = replace(points, **{**own, "chip": chip, name: point.function.point})
        rest = replace(points, **{**own, "accumulate": None, "chip": "auto", name: None})
        found.append(PointsOfParts(tensor, point.function.split, rounded, rest))
    return tuple(found)
