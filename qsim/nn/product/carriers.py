"""The dtype in which a product is computed: the cheapest that holds both operands exactly.

A product of two numbers with at most 12 significant bits each is exact in float32, and tensor cores accumulate in float32. So 8-bit formats
multiply in bfloat16 with no error other than that of the sum. If the result has the operands' 16-bit dtype, torch computes the sum: with
`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`, which is on by default, it may also round partial sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qsim.formats import BF16, FP16, FP32, TF32, Float, Format, contains, holds

_OWN_FORMAT = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}

# Dtypes of tensor cores come first. CPUs have none: float32 is their cheapest.
_CANDIDATES = {"cuda": (torch.bfloat16, torch.float16, torch.float32, torch.float64), "cpu": (torch.float32, torch.float64)}

# The precision to which torch's settings may reduce the operands of a float32 product.
_SHORTENED = {"cuda": TF32, "cpu": BF16}

#: A format that holds the values of an operand, or `None` if it is not rounded, and its original dtype.
Values = tuple[Format | None, torch.dtype]


class ProductCarrier(NamedTuple):
    """The carrier of a product.

    Attributes:
        dtype: The dtype of both operands.
        exact: Whether they are float32 with more bits than torch's settings may keep, so that they need `qsim.nn.product.float32`.
    """

    dtype: torch.dtype
    exact: bool = False


def can_hold(dtype: torch.dtype, fmt: Format | None, own: torch.dtype) -> bool:
    """Whether a dtype holds what a tensor of dtype `own` is rounded to: values of a format, regardless of scales, or its own."""
    if fmt is not None:
        return holds(dtype, fmt)
    return dtype in (own, torch.float64) or (own in _OWN_FORMAT and holds(dtype, _OWN_FORMAT[own]))


def product_carrier(a: Values, b: Values, device: torch.device, narrow: torch.dtype | None = None) -> ProductCarrier:
    """The cheapest carrier of two operands, each given by a format that holds its values.

    Operands that are not rounded stay in their own dtype: then the product is torch's own.

    Args:
        a: The first operand.
        b: The second.
        device: Where the product is computed.
        narrow: The only 16-bit dtype allowed, or float32 if none is; any is by default.
    """
    if a[0] is None and b[0] is None:
        return ProductCarrier(torch.promote_types(a[1], b[1]))
    kind = device.type if device.type in _CANDIDATES else "cpu"
    candidates = [dtype for dtype in _CANDIDATES[kind] if dtype.itemsize > 2 or narrow in (None, dtype)]
    dtype = next(dtype for dtype in candidates if can_hold(dtype, *a) and can_hold(dtype, *b))
    survive = _survives(_SHORTENED[kind], *a) and _survives(_SHORTENED[kind], *b)
    return ProductCarrier(dtype, dtype == torch.float32 and not survive)


def _survives(shortened: Float, fmt: Format | None, own: torch.dtype) -> bool:
    if fmt is None:
        return own in _OWN_FORMAT and contains(shortened, _OWN_FORMAT[own])
    return contains(shortened, fmt)
