"""The dtype in which a product is computed: the cheapest that holds both operands exactly.

A product of two numbers with at most 12 significant bits each is exact in float32, and float32 is what tensor cores add up in. So an
8-bit format multiplies in bfloat16 without any error but that of the sum. Where the result has the operands' 16 bits, it is torch that
sums: as `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` has it, which is on by default, it may round partial sums, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.formats import BF16, FP16, FP32, TF32, Float, Format, contains, holds
from qsim.nn import float32
from qsim.quantizer import Quantizer

_OWN_FORMAT = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}

# What tensor cores multiply comes first. Processors have none: float32 is their cheapest.
_CANDIDATES = {"cuda": (torch.bfloat16, torch.float16, torch.float32, torch.float64), "cpu": (torch.float32, torch.float64)}

# To what torch's settings may shorten the operands of a float32 product.
_SHORTENED = {"cuda": TF32, "cpu": BF16}

Operand = tuple[Quantizer | None, torch.dtype]
#: A format that holds the values of an operand, or none if nothing rounds it, and the dtype that it had.
Values = tuple[Format | None, torch.dtype]


@dataclass(frozen=True)
class Carrier:
    """How a product is computed.

    Attributes:
        dtype: The dtype of both operands.
        exact: Whether they are float32 with more bits than torch may be set to multiply, so that they need `qsim.nn.float32`.
    """

    dtype: torch.dtype
    exact: bool = False


def can_hold(dtype: torch.dtype, point: Quantizer | None, own: torch.dtype) -> bool:
    """Whether a dtype holds what a point makes of a tensor, which is of the dtype `own`; scales are not asked for."""
    return _can_hold(dtype, None if point is None else point.format, own)


def _can_hold(dtype: torch.dtype, fmt: Format | None, own: torch.dtype) -> bool:
    if fmt is not None:
        return holds(dtype, fmt)
    return dtype in (own, torch.float64) or (own in _OWN_FORMAT and holds(dtype, _OWN_FORMAT[own]))


def carrier(a: Operand, b: Operand, device: torch.device, narrow: torch.dtype | None = None) -> Carrier:
    """The cheapest carrier of two operands, each given as what quantizes it and its dtype.

    Operands that nothing quantizes stay in their own dtype: then the product is torch's own.

    Args:
        a: The first operand.
        b: The second.
        device: Where the product is computed.
        narrow: The only dtype of 16 bits that will do, or float32 if none will; any will by default.
    """
    (of_a, own_a), (of_b, own_b) = a, b
    return carrier_of((None if of_a is None else of_a.format, own_a), (None if of_b is None else of_b.format, own_b), device, narrow)


def carrier_of(a: Values, b: Values, device: torch.device, narrow: torch.dtype | None = None) -> Carrier:
    """`carrier` of operands that are given by formats that hold their values."""
    (format_a, own_a), (format_b, own_b) = a, b
    if format_a is None and format_b is None:
        return Carrier(torch.promote_types(own_a, own_b))
    if torch.compiler.is_compiling():
        return _choose(a, b, device.type, narrow)
    # Formats by what spells them: values as large as formats take longer to look up than to ask.
    facts = (format_a and format_a.spelling[0], own_a, format_b and format_b.spelling[0], own_b, device.type, narrow)
    known = _CHOSEN.get(facts)
    if known is None:
        known = _CHOSEN[facts] = _choose(a, b, device.type, narrow)
    return known


_CHOSEN: dict[Hashable, Carrier] = {}


def _choose(a: Values, b: Values, kind: str, narrow: torch.dtype | None) -> Carrier:
    kind = kind if kind in _CANDIDATES else "cpu"
    candidates = [dtype for dtype in _CANDIDATES[kind] if dtype.itemsize > 2 or narrow in (None, dtype)]
    dtype = next(dtype for dtype in candidates if _can_hold(dtype, *a) and _can_hold(dtype, *b))
    survive = _survives(_SHORTENED[kind], *a) and _survives(_SHORTENED[kind], *b)
    return Carrier(dtype, dtype == torch.float32 and not survive)


def _survives(shortened: Float, fmt: Format | None, own: torch.dtype) -> bool:
    if fmt is None:
        return own in _OWN_FORMAT and contains(shortened, _OWN_FORMAT[own])
    return contains(shortened, fmt)


def multiply(
    a: Tensor, b: Tensor, dtype: torch.dtype, *, exact: bool = False, factors: Sequence[Tensor] = (), bias: Tensor | None = None
) -> Tensor:
    """The matrix product of two operands in their carrier, summed in float32, times factors, in the dtype of the result.

    A bias is added if there are factors.
    """
    if factors:
        return rescaled(multiply(a, b, torch.promote_types(dtype, torch.float32), exact=exact), factors, dtype, bias)
    if exact:
        return in_dtype(float32.matmul(a, b), dtype)
    if a.dtype == dtype:
        return torch.matmul(a, b)
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        product = torch.mm(a, b, out_dtype=torch.float32) if a.dim() == 2 else torch.bmm(a, b, out_dtype=torch.float32)
        return in_dtype(product, dtype)
    return torch.matmul(a, b).to(dtype)


def rescaled(product: Tensor, factors: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """A product of float32 or float64 times scales that were left out of its operands, plus a bias, in the result's dtype."""
    return torch.ops.qsim.rescaled.default(product, factors, bias, dtype)  # type: ignore[no-any-return]


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result in the dtype that is asked for.

    torch 2.11's compiler gives zero for the gradients of an autograd function whose result went through a conversion to its own dtype.
    """
    return x if x.dtype == dtype else x.to(dtype)
