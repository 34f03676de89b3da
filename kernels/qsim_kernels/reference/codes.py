"""Values to codes and back, in plain torch.

Sign and magnitude: a code's lower bits count the magnitudes upwards from zero. Adding the smallest normal to a subnormal value puts the
count into the carrier's mantissa, where that of the normal values is already.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim_kernels.carrier import Plan
from qsim_kernels.grid import Coding, Grid


def codes_of(rounded: Tensor, grid: Grid, coding: Coding, plan: Plan) -> Tensor:
    """The codes of values of a grid, given as bit patterns of the carrier; of a NaN without a code, that of the largest value.

    Returns:
        An int64 tensor of codes without sign extension.
    """
    magnitude = rounded & ~plan.carrier.sign
    carrier = torch.float32 if rounded.dtype == torch.int32 else torch.float64
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


def values_of(codes: Tensor, grid: Grid, coding: Coding, plan: Plan) -> Tensor:
    """The values of codes, as bit patterns of the carrier.

    Args:
        codes: int64 codes without sign extension.
        grid: The values.
        coding: The codes.
        plan: The grid in the carrier's bits.
    """
    wide = plan.carrier.mantissa > 23
    pattern, carrier = (torch.int64, torch.float64) if wide else (torch.int32, torch.float32)
    if coding.twos_complement:
        sign = (codes >> (coding.bits - 1)) & 1 if plan.signed else torch.zeros_like(codes)
        return ((codes - (sign << coding.bits)).to(carrier) * grid.least).view(pattern)
    signed = plan.signed
    magnitude = codes & ((1 << (coding.bits - signed)) - 1)
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
    if signed:
        negative = (codes >> (coding.bits - 1)) & 1 == 1
        bits = torch.where(negative & (bits <= plan.carrier.infinity), bits | plan.carrier.sign, bits)
    return torch.where(codes == coding.nan, plan.carrier.nan, bits).to(pattern)
