"""Conversion of values to codes and back, in plain torch.

In sign-magnitude codes the lower bits number the magnitudes upwards from zero. Adding the smallest normal to a subnormal value puts that
number into the carrier's mantissa, where the normal values already have it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim_kernels.carrier import GridBits
from qsim_kernels.grid import Coding, Grid
from qsim_kernels.reference.rounding import float_dtype


def codes_of(rounded: Tensor, grid: Grid, coding: Coding, plan: GridBits) -> Tensor:
    """The codes of values of a grid; of a NaN without a code, that of the largest value.

    Args:
        rounded: The values, as bit patterns of the carrier.
        grid: The grid's values.
        coding: Their codes.
        plan: The grid in the carrier's bits.

    Returns:
        An int64 tensor of codes without sign extension.
    """
    magnitude = rounded & ~plan.carrier.sign
    carrier = float_dtype(plan)
    nan = magnitude > plan.carrier.infinity
    if coding.nan < 0:
        magnitude = torch.where(nan, plan.top, magnitude).to(magnitude.dtype)
    if coding.twos_complement:
        steps = (magnitude.view(carrier) * (1.0 / grid.least)).to(torch.int64)
        return torch.where(rounded < 0, -steps, steps) & ((1 << coding.bits) - 1)
    lowest = grid.exponent + plan.carrier.bias
    below = magnitude < (lowest << plan.carrier.mantissa)
    value = magnitude.view(carrier)
    shifted = torch.where(below, value + math.ldexp(1.0, grid.exponent), value).view(rounded.dtype)
    code = (shifted >> plan.shift).to(torch.int64) - ((lowest - grid.zero) << grid.mantissa)
    code -= below.to(torch.int64) << grid.mantissa
    if coding.infinity >= 0:
        code = torch.where(magnitude == plan.carrier.infinity, coding.infinity, code)
    if plan.signed:
        code |= (rounded < 0).to(torch.int64) << (coding.bits - 1)
    return code if coding.nan < 0 else torch.where(nan, coding.nan, code)


def values_of(codes: Tensor, grid: Grid, coding: Coding, plan: GridBits) -> Tensor:
    """The values of codes, as bit patterns of the carrier.

    Args:
        codes: int64 codes without sign extension.
        grid: The values.
        coding: The codes.
        plan: The grid in the carrier's bits.
    """
    carrier = float_dtype(plan)
    pattern = torch.int64 if carrier == torch.float64 else torch.int32
    if coding.twos_complement:
        sign = (codes >> (coding.bits - 1)) & 1 if plan.signed else torch.zeros_like(codes)
        return ((codes - (sign << coding.bits)).to(carrier) * grid.least).view(pattern)
    magnitude = codes & ((1 << (coding.bits - plan.signed)) - 1)
    lowest = grid.exponent + plan.carrier.bias
    subnormal = (magnitude >> grid.mantissa) == 0 if grid.zero else torch.zeros_like(codes, dtype=torch.bool)
    shifted = magnitude + ((lowest - grid.zero + subnormal.to(torch.int64)) << grid.mantissa)
    value = (shifted << plan.shift).to(pattern).view(carrier)
    value = torch.where(subnormal, value - math.ldexp(1.0, grid.exponent), value)
    if grid.zero and grid.least == math.ldexp(1.0, grid.exponent):
        value = torch.where(subnormal, 0.0, value)
    bits = value.view(pattern)
    bits = torch.where(bits > plan.top, plan.carrier.nan, bits)
    if coding.infinity >= 0:
        bits = torch.where(magnitude == coding.infinity, plan.carrier.infinity, bits)
    if plan.signed:
        negative = (codes >> (coding.bits - 1)) & 1 == 1
        bits = torch.where(negative & (bits <= plan.carrier.infinity), bits | plan.carrier.sign, bits)
    return torch.where(codes == coding.nan, plan.carrier.nan, bits).to(pattern)
