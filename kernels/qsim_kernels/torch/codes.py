"""Conversion of values to codes and back, in plain torch.

In sign-magnitude codes the lower bits number the magnitudes upwards from zero. Adding the smallest normal to a subnormal value puts that
number into the carrier's mantissa, where the normal values already have it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim_kernels.numbers.carrier import GridBits
from qsim_kernels.numbers.grid import Coding, Grid
from qsim_kernels.torch.rounding import float_dtype


def codes_of(rounded: Tensor, grid: Grid, coding: Coding, how: GridBits) -> Tensor:
    """The codes of values of a grid; of a NaN without a code, that of the largest value.

    Args:
        rounded: The values, as bit patterns of the carrier.
        grid: The grid's values.
        coding: Their codes.
        how: The grid in the carrier's bits.

    Returns:
        An int64 tensor of codes without sign extension.
    """
    magnitude = rounded & ~how.carrier.sign
    carrier = float_dtype(how)
    nan = magnitude > how.carrier.infinity
    if coding.nan < 0:
        magnitude = torch.where(nan, how.top, magnitude).to(magnitude.dtype)
    if coding.twos_complement:
        steps = (magnitude.view(carrier) * (1.0 / grid.least)).to(torch.int64)
        return torch.where(rounded < 0, -steps, steps) & ((1 << coding.bits) - 1)
    lowest = grid.exponent + how.carrier.bias
    below = magnitude < (lowest << how.carrier.mantissa)
    value = magnitude.view(carrier)
    shifted = torch.where(below, value + math.ldexp(1.0, grid.exponent), value).view(rounded.dtype)
    code = (shifted >> how.shift).to(torch.int64) - ((lowest - grid.zero) << grid.mantissa)
    code -= below.to(torch.int64) << grid.mantissa
    if coding.infinity >= 0:
        code = torch.where(magnitude == how.carrier.infinity, coding.infinity, code)
    if how.signed:
        code |= (rounded < 0).to(torch.int64) << (coding.bits - 1)
    return code if coding.nan < 0 else torch.where(nan, coding.nan, code)


def values_of(codes: Tensor, grid: Grid, coding: Coding, how: GridBits) -> Tensor:
    """The values of codes, as bit patterns of the carrier.

    Args:
        codes: int64 codes without sign extension.
        grid: The values.
        coding: The codes.
        how: The grid in the carrier's bits.
    """
    carrier = float_dtype(how)
    pattern = torch.int64 if carrier == torch.float64 else torch.int32
    if coding.twos_complement:
        sign = (codes >> (coding.bits - 1)) & 1 if how.signed else torch.zeros_like(codes)
        return ((codes - (sign << coding.bits)).to(carrier) * grid.least).view(pattern)
    magnitude = codes & ((1 << (coding.bits - how.signed)) - 1)
    lowest = grid.exponent + how.carrier.bias
    subnormal = (magnitude >> grid.mantissa) == 0 if grid.zero else torch.zeros_like(codes, dtype=torch.bool)
    shifted = magnitude + ((lowest - grid.zero + subnormal.to(torch.int64)) << grid.mantissa)
    value = (shifted << how.shift).to(pattern).view(carrier)
    value = torch.where(subnormal, value - math.ldexp(1.0, grid.exponent), value)
    if grid.zero and grid.least == math.ldexp(1.0, grid.exponent):
        value = torch.where(subnormal, 0.0, value)
    bits = value.view(pattern)
    bits = torch.where(bits > how.top, how.carrier.nan, bits)
    if coding.infinity >= 0:
        bits = torch.where(magnitude == coding.infinity, how.carrier.infinity, bits)
    if how.signed:
        negative = (codes >> (coding.bits - 1)) & 1 == 1
        bits = torch.where(negative & (bits <= how.carrier.infinity), bits | how.carrier.sign, bits)
    return torch.where(codes == coding.nan, how.carrier.nan, bits).to(pattern)
