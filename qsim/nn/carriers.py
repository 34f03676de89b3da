"""The dtype in which a product is computed: the cheapest that holds both operands exactly.

A product of two numbers with at most 12 significant bits each is exact in float32, and float32 is what tensor cores add up in. So an
8-bit format multiplies in bfloat16 without any error but that of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.formats import BF16, FP16, FP32, holds
from qsim.quantizer import Quantizer

_OWN_FORMAT = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}

# What tensor cores multiply comes first. Processors have none: float32 is their cheapest.
_CANDIDATES = {"cuda": (torch.bfloat16, torch.float16, torch.float32, torch.float64), "cpu": (torch.float32, torch.float64)}


def can_hold(dtype: torch.dtype, point: Quantizer | None, own: torch.dtype) -> bool:
    """Whether a dtype holds what a point makes of a tensor, which is of the dtype `own`."""
    if point is not None:
        return holds(dtype, point.format)
    return dtype in (own, torch.float64) or (own in _OWN_FORMAT and holds(dtype, _OWN_FORMAT[own]))


def carrier(a: tuple[Quantizer | None, torch.dtype], b: tuple[Quantizer | None, torch.dtype], device: torch.device) -> torch.dtype:
    """The cheapest dtype that holds two operands, each given as what quantizes it and its dtype.

    Operands that nothing quantizes stay in their own dtype: then the product is torch's own.
    """
    if a[0] is None and b[0] is None:
        return torch.promote_types(a[1], b[1])
    candidates = _CANDIDATES.get(device.type, _CANDIDATES["cpu"])
    return next(dtype for dtype in candidates if can_hold(dtype, *a) and can_hold(dtype, *b))


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix product of two operands in their carrier, summed in float32, in the dtype of the result."""
    if a.dtype == dtype:
        return torch.matmul(a, b)
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        product = torch.mm(a, b, out_dtype=torch.float32) if a.dim() == 2 else torch.bmm(a, b, out_dtype=torch.float32)
        return product.to(dtype)
    return torch.matmul(a, b).to(dtype)
