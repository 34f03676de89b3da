"""Rounding onto a grid with plain torch, on any device: `arithmetic.rounding` on tensors of bits, with a faster way to round to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.meanings import torch as meaning
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE, GridBits, bits_that_matter, used_bits, variant_of
from qsim_kernels.numbers.grid import Mode, Rule
from qsim_kernels.private import is_in_transform
from qsim_kernels.torch.philox import ElementNoise, random_bits
from qsim_kernels.torch.tables import rounding_table


def float_dtype(grid: GridBits) -> torch.dtype:
    """The carrier's float dtype."""
    return torch.float64 if grid.carrier == DOUBLE else torch.float32


def as_values(bits: Tensor, grid: GridBits, dtype: torch.dtype) -> Tensor:
    """Convert the carrier's bit patterns to a dtype that holds their values exactly; NaN results do not depend on the processor."""
    if dtype == torch.bfloat16:
        single = bits if grid.carrier == SINGLE else bits.view(torch.float64).to(torch.float32).view(torch.int32)
        return (single >> 16).to(torch.int16).view(dtype)
    values = bits.view(float_dtype(grid)).to(torch.float32 if dtype != torch.float64 else dtype)
    if dtype == torch.float16:
        halves = values.to(dtype)
        return torch.where(halves.isnan(), 0x7FFF, halves.view(torch.int16)).view(dtype)
    return values


_NANS = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF),
}


def one_nan(x: Tensor) -> Tensor:
    """Replace every NaN by the canonical NaN that all roundings return."""
    pattern, nan = _NANS[x.dtype]
    if is_in_transform():
        # Before torch 2.13 vmap does not support `view(dtype)`.
        return torch.where(x.isnan(), torch.full((), nan, dtype=pattern, device=x.device).view(x.dtype), x)
    return x.view(pattern).masked_fill(x.isnan(), nan).view(x.dtype)


def rounded(bits: Tensor, grid: GridBits, rule: Rule, noise: ElementNoise | None) -> Tensor:
    """Round values, given and returned as bit patterns of the carrier, drawing only random bits that can matter.

    The first 16 of 32 random bits decide nearly all roundings. The rest are drawn only where they could matter, because all zeros and all
    ones lead to different neighbours; on a GPU everywhere, because the host would have to wait to know where.

    Args:
        bits: int32 patterns of float32 values, or int64 patterns of float64 values, in one dimension.
        grid: The grid, in the bits of the carrier.
        rule: The rounding.
        noise: The source of random bits, for stochastic rounding.
    """
    if rule.mode != Mode.STOCHASTIC:
        return round_bits(bits, grid, rule)
    assert noise is not None  # the operators reject stochastic rounding without a seed
    arithmetic, variant = meaning.rounding(grid.carrier), variant_of(grid, rule)
    listed = with_table(grid, rule, bits.device)
    count = bits_that_matter(grid, rule)
    used = used_bits(grid.carrier, count, rule.correction)

    def chosen(patterns: Tensor, words: Tensor) -> Tensor:
        result: Tensor = arithmetic.round_bits(patterns, arithmetic.random_bits(words, used), listed, variant)
        return result

    if bits.is_cuda and count > 16:
        return chosen(bits, random_bits(noise, 32))
    first = noise.first_bits() << 16
    least = chosen(bits, first)
    if count <= 16:
        return least
    most = chosen(bits, first | 0xFFFF)
    open_ = (least != most).nonzero().view(-1)
    if open_.numel():
        least[open_] = chosen(bits[open_], random_bits(noise.of(open_), 32))
    return least


def round_bits(bits: Tensor, grid: GridBits, rule: Rule) -> Tensor:
    """Round values, given and returned as bit patterns of the carrier, without random bits."""
    if rounds_by_addition(grid, rule):
        return nearest_by_addition(bits, grid, rule)
    listed = with_table(grid, rule, bits.device)
    result: Tensor = meaning.rounding(grid.carrier).round_bits(bits, None, listed, variant_of(grid, rule))
    return result


def with_table(grid: GridBits, rule: Rule, device: torch.device) -> GridBits:
    """A grid whose table, if it is one, is in memory."""
    return grid._replace(table=rounding_table(grid, rule, device)) if grid.table else grid


def rounds_by_addition(grid: GridBits, rule: Rule) -> bool:
    """Whether `nearest_by_addition` works: evenly spaced to zero, symmetric, more than one value per binade, room for the power."""
    if rule.mode != Mode.NEAREST:
        return False
    room = 1 <= grid.shift < grid.carrier.mantissa and (grid.limit(rule) >> grid.carrier.mantissa) + grid.shift <= 2 * grid.carrier.bias
    return grid.low > 0 and grid.top == grid.bottom and room


def nearest_by_addition(bits: Tensor, grid: GridBits, rule: Rule) -> Tensor:
    """Add and subtract a power of two near which the carrier's spacing is the grid's: the addition rounds, ties to even."""
    carrier, mantissa = grid.carrier, grid.carrier.mantissa
    magnitude = bits & carrier.nan
    within = magnitude.clamp(max=grid.limit(rule))
    power = (within & carrier.infinity).clamp_(min=grid.low << mantissa).add_(grid.shift << mantissa).view(float_dtype(grid))
    result = within.view(power.dtype).add(power).sub_(power).view(bits.dtype)
    missing = carrier.infinity - magnitude
    if not rule.saturates:
        result = meaning.where(grid.top - result >> carrier.last, grid.over, result)
        missing |= carrier.infinity - result
    if grid.signed:
        sign = bits & carrier.sign
        result |= sign if grid.negative_zero else sign & (-result >> carrier.last)
    with_nan: Tensor = meaning.where(missing >> carrier.last, carrier.nan, result)
    return with_nan
