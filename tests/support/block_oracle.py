"""Blocks in fractions: the scale of each, and every element rounded under it.

Like the contract, this rounds to float32 the inverse of a scale that is not a power of two, and the products with it; everything else is
exact.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from support import oracle
from support.oracle import Format
from support.scales import scale_of

LARGEST = Fraction(torch.finfo(torch.float32).max)


def float32(x: Fraction) -> Fraction:
    """A number rounded to float32, to nearest even; none is beyond its largest."""
    if not x:
        return x
    power = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    power -= abs(x) < Fraction(2) ** power
    unit = Fraction(2) ** max(power - 23, -149)
    return round(x / unit) * unit


@functools.cache
def in_float32(fmt: Format, x: Fraction, rounding: str) -> Fraction:
    """A number rounded to a value of the format, saturated."""
    return Fraction(oracle.round_exact(float(x), fmt, rounding, "saturate"))


def expected_block(
    block: list[float], element: Format, scale: Fraction | None, rounding: str, under: Fraction = Fraction(1)
) -> list[float]:
    """The elements of a block, rounded under its scale, which is None for NaN."""
    if scale is None:
        return [math.nan] * len(block)
    whole = float32(scale * under)
    inverse = float32(1 / whole)
    found = []
    for x in block:
        # What is not zero does not underflow to zero, from which directed roundings would not lead away.
        quotient = float32(Fraction(x) * inverse) or Fraction(math.copysign(2.0**-149, x) if x else 0)
        rounded = in_float32(element, quotient, rounding)
        value = float32(rounded * whole)
        # The sign of zeros is the element's, unless its format has only one zero.
        negative = math.copysign(1.0, x) < 0 and oracle.has_negative_zero(element)
        saturated = min(max(value, -LARGEST), LARGEST)
        found.append(-0.0 if negative and not value else float(saturated))
    return found


def blocks_of(values: list[float], size: int) -> list[list[float]]:
    """The values in blocks, the last of which may be shorter."""
    return [values[i : i + size] for i in range(0, len(values), size)]


def expect(x: Tensor, element: Format, scaling: Any, rounding: str = "nearest", under: Fraction = Fraction(1)) -> Tensor:
    """The oracle's result for a tensor in blocks along a dimension."""
    lines = x.double().movedim(scaling.dim, -1)
    found = []
    for line in lines.reshape(-1, lines.shape[-1]).tolist():
        for block in blocks_of(line, scaling.size):
            scale = scale_of(
                [float(Fraction(v) / under) if v and math.isfinite(v) else v for v in block],
                element,
                scaling.format,
                scaling.rule,
                scaling.margin,
            )
            found += expected_block(block, element, scale, rounding, under)
    return torch.tensor(found, dtype=torch.float64).view(lines.shape).movedim(-1, scaling.dim).to(x.dtype)
