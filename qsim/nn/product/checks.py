"""Early errors of products: arguments that cannot be rounded, and scales and transforms that an operation does not support."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qsim.formats.dtypes import FLOATS
from qsim.functional.quantizer import Quantizer
from qsim.nn.product.autocast import autocasts
from qsim.nn.product.bilinear import Product
from qsim.nn.product.carriers import can_hold
from qsim.recipes.five_point import FivePoint
from qsim.scaling.tiling import PerSlice

_HELP = "Give this layer other points, or exclude it"


def check_operands(points: FivePoint, product: Product, a: Tensor, w: Tensor, bias: Tensor | None, *, two_inputs: bool) -> None:
    """Raise an error for operands that cannot be rounded or multiplied, and for points that do not fit them."""
    if points.is_delayed:
        raise ValueError(
            "delayed scales live in a module, which keeps their history: give the points to a layer of qsim.nn, or to qsim.convert"
        )
    if two_inputs and points.is_scaled:
        _check_two_inputs(points)
    if product.is_lookup:
        return
    for operand in (a, w):
        if operand.layout != torch.strided:
            raise TypeError(f"points round dense tensors only, got an operand of layout {operand.layout}")
        if operand.dtype not in FLOATS:
            raise TypeError(f"points round float32, bfloat16, float16 and float64 only, got an operand of {operand.dtype}")
    given = [x for x in (a, w, bias) if x is not None]
    if any(x.device != a.device for x in given):
        raise ValueError(f"the operands of a product must be on one device, got {', '.join(str(x.device) for x in given)}")
    lower = torch.get_autocast_dtype(a.device.type) if autocasts(a.device) else None
    dtypes = [x.dtype if lower is None or x.dtype == torch.float64 else lower for x in given]
    if len(set(dtypes)) > 1:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(
            f"the operands of a product, and its bias, must be of one dtype, as in torch, got {names}: cast them, or use autocast"
        )


def check_bias(name: str, bias: Tensor | None, features: int) -> None:
    """Raise an error for a bias without exactly one number per feature; a broadcast bias would get a wrong gradient."""
    if bias is not None and bias.shape != (features,):
        raise ValueError(f"{name}: bias must have shape {(features,)}, got {tuple(bias.shape)}")


def check_table(dtype: torch.dtype, points: FivePoint) -> None:
    """Raise an error for a table whose dtype cannot be rounded, or cannot hold the result."""
    if dtype not in FLOATS:
        raise TypeError(f"embedding: points round float32, bfloat16, float16 and float64 only, got a table of {dtype}")
    point = points.used["weight"]
    if isinstance(point, Quantizer) and not can_hold(dtype, point.format, dtype):
        raise ValueError(f"embedding: the result is {dtype}, which cannot hold every value of {point.format!r}")


def _check_two_inputs(points: FivePoint) -> None:
    """Raise an error for a gradient with a transform where the other operand of its product cannot have it.

    In a product of two inputs each is multiplied by the gradient, and needs the same transform.
    """
    for name, grad in (("grad", points.grad), ("grad_w", points.grad_w)):
        if isinstance(grad, Quantizer) and grad.transform is not None and not isinstance(points.used["act_bwd"], Quantizer):
            wanted = f"act_bwd must be a quantizer, got {points.act_bwd!r}"
            raise ValueError(f"matmul: {name} is transformed by {grad.transform!r}, so the other input needs the same transform: {wanted}")


def check_groups(name: str, points: FivePoint, transposed: bool) -> None:
    """Raise an error for scales without a meaning in grouped convolutions: per channel along a dimension that is one group's."""
    grad_w = "grad" if points.grad_w is None else "grad_w"
    for point in ("weight", grad_w) if transposed else ("weight_bwd", "act_bwd"):
        quantizer = points.used[point]
        if isinstance(quantizer, Quantizer) and isinstance(quantizer.scale, PerSlice):
            raise ValueError(
                f"{name}: {point} cannot have a scale for each channel where channels fall into groups, got {quantizer.scale!r}. {_HELP}"
            )
    _refuse_transforms(f"{name}: channels that fall into groups are not mixed over their borders", points, ("act", "grad"))


def check_lookup(points: FivePoint) -> None:
    """Raise an error for transforms, which nothing would undo, and for an accumulator of gradients with scales, which it cannot add."""
    grad = points.used["grad"]
    if points.sums[2] is not None and isinstance(grad, Quantizer) and grad.scale is not None:
        raise ValueError(f"embedding: an accumulator adds gradients without scales, got {grad.scale!r} at grad")
    _refuse_transforms("embedding: a transform cancels only in a product, and a lookup is none", points, ("weight", "grad"))


def _refuse_transforms(reason: str, points: FivePoint, names: Sequence[str]) -> None:
    for name in names:
        quantizer = points.used[name]
        if isinstance(quantizer, Quantizer) and quantizer.transform is not None:
            raise ValueError(f"{reason}: {name} has {quantizer.transform!r}. {_HELP}")
