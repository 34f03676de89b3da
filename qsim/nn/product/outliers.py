"""Points whose outliers are apart: the points of the two products that replace one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from qsim.functional.callables import CallablePoint
from qsim.points.outliers import Outliers
from qsim.recipes.five_point import FivePoint

#: The tensors that a second product may complete, by their points.
_POINTS = ("act", "weight", "grad")


#: The points of a product, or its plan.
How = TypeVar("How")


class Split(NamedTuple, Generic[How]):
    """Two products in place of one: a tensor is the sum of a part that is rounded and of its outliers.

    Attributes:
        tensor: Which tensor it is: 0 for the first operand, 1 for the second, 2 for the gradient of the result.
        parts: Returns what is rounded and the rest.
        rounded: The points or the plan of the product of what is rounded.
        rest: Those of the product of the rest, which is not rounded there, and added in float32.
    """

    tensor: int
    parts: Callable[[Tensor], tuple[Tensor, Tensor]]
    rounded: How
    rest: How


def split_of(points: FivePoint, *, two_inputs: bool) -> Split[FivePoint] | None:
    """The first tensor whose outliers are apart, if there is one.

    Where the backward pass rounds the operand at a point of its own, or both operands are inputs, one product takes the sum of the parts.
    """
    given: dict[str, Any]
    without: dict[str, Any]
    for tensor, name in enumerate(_POINTS):
        point = getattr(points, name)
        if not isinstance(point, CallablePoint) or not isinstance(point.function, Outliers) or point.gradient != "own":
            continue
        outliers = point.function
        if name == "grad":
            if points.grad_w is not None:
                continue
            _check_chip(points)
            given = {"grad": outliers.point, "chip": "auto" if points.accumulate is None else "never"}
            return Split(tensor, outliers.split, replace(points, **given), replace(points, grad=None, accumulate=None, chip="auto"))
        if two_inputs or getattr(points, f"{name}_bwd") != "same":
            continue
        given, without = {name: outliers.point}, {name: None}
        inner = replace(points, output=None, bias=None)
        return Split(tensor, outliers.split, replace(inner, **given), replace(inner, accumulate=None, chip="auto", **without))
    return None


def _check_chip(points: FivePoint) -> None:
    if points.chip == "require":
        raise ValueError("grad: Outliers are added to products in float32, which no chip does: give chip='auto' or 'never'")
