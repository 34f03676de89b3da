"""Early errors for scales and transforms that an operation does not support."""

from __future__ import annotations

from collections.abc import Sequence

from qsim.functional.quantizer import Quantizer
from qsim.recipes.five_point import FivePoint
from qsim.scaling.tiling import PerSlice

_HELP = "Give this layer other points, or exclude it"


def check_matmul(points: FivePoint) -> None:
    """Raise an error for a gradient with a transform where the other operand of its product cannot have it.

    In a product of two inputs each is multiplied by the gradient, and needs the same transform.
    """
    for name, grad in (("grad", points.grad), ("grad_w", points.grad_w)):
        if grad is not None and grad.transform is not None and not isinstance(points.act_bwd, Quantizer):
            wanted = f"act_bwd must be a quantizer, got {points.act_bwd!r}"
            raise ValueError(f"matmul: {name} is transformed by {grad.transform!r}, so the other input needs the same transform: {wanted}")


def check_groups(name: str, points: FivePoint, transposed: bool) -> None:
    """Raise an error for scales without a meaning in grouped convolutions: per channel along a dimension that is one group's."""
    grad_w = "grad" if points.grad_w is None else "grad_w"
    for point in ("weight", grad_w) if transposed else ("weight_bwd", "act_bwd"):
        quantizer = getattr(points, point)
        if isinstance(quantizer, Quantizer) and isinstance(quantizer.scale, PerSlice):
            raise ValueError(
                f"{name}: {point} cannot have a scale for each channel where channels fall into groups, got {quantizer.scale!r}. {_HELP}"
            )
    _refuse_transforms(f"{name}: channels that fall into groups are not mixed over their borders", points, ("act", "grad"))


def check_lookup(points: FivePoint) -> None:
    """Raise an error for transforms, which nothing would undo."""
    _refuse_transforms("embedding: a transform cancels only in a product, and a lookup is none", points, ("weight", "grad"))


def _refuse_transforms(reason: str, points: FivePoint, names: Sequence[str]) -> None:
    for name in names:
        quantizer: Quantizer | None = getattr(points, name)
        if quantizer is not None and quantizer.transform is not None:
            raise ValueError(f"{reason}: {name} has {quantizer.transform!r}. {_HELP}")
