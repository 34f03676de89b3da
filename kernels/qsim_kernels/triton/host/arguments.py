"""Kernel arguments for a seed, and for a grid, a rounding and a coding: the variant to compile, and the runtime numbers."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from torch import Tensor

from qsim_kernels.meanings.triton import INTERPRETED
from qsim_kernels.numbers.buckets import buckets_of
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE, GridBits, bits_that_matter, grid_bits, rounding_bits, used_bits, variant_of
from qsim_kernels.numbers.encoding import coding_bits, largest_code
from qsim_kernels.numbers.grid import Coding, Grid, GridRounding, Mode, Overflow, Rule
from qsim_kernels.triton.device.values import CodeVariant, KernelVariant
from qsim_kernels.triton.host.capabilities import supports_packed_16_bit
from qsim_kernels.triton.host.launcher import TableAddress

_FAST_MODES = (Mode.NEAREST, Mode.TOWARD_ZERO, Mode.UP, Mode.DOWN, Mode.STOCHASTIC)


def seed_of(seed: Tensor | None, x: Tensor) -> tuple[Tensor | None, int]:
    """The seed by pointer if it is on the device, without synchronizing; otherwise by value."""
    if seed is None:
        return None, 0
    return (seed, 0) if seed.device == x.device else (None, int(seed))


@lru_cache(maxsize=4096)
def rounding(chosen: GridRounding, wide: bool, writes_codes: bool = False) -> tuple[KernelVariant, tuple[Any, ...]]:
    """The variant and the numbers of a rounding, those of `RoundingNumbers`; a table's address is a `TableAddress`.

    Args:
        chosen: The rounding.
        wide: Use float64 even if float32 is enough.
        writes_codes: Whether results of rounding onto a table are codes.
    """
    grid, rule = chosen
    bits = rounding_bits(grid, rule, wide or (bool(grid.table) and not buckets_of(grid.table, rule).fits_words))
    rule = rule._replace(bits=bits_that_matter(bits, rule))
    draws_16 = 0 < rule.bits <= 16
    variant = KernelVariant(
        variant_of(bits, rule),
        fast=_is_fast(bits, rule),
        wide=bits.carrier == DOUBLE,
        draws_16=draws_16,
        uses_all=rule.bits == (16 if draws_16 else 32) and not rule.correction,
        only_powers=grid.mantissa == 0 and rule.mode == Mode.NEAREST,
    )
    numbers = bits.numbers()
    if grid.table and bits.carrier == SINGLE:
        buckets = buckets_of(grid.table, rule)
        table = variant.rounding._replace(table=buckets.size)
        variant = variant._replace(rounding=table, width=buckets.width, steps=buckets.steps)
    if grid.table:
        numbers = numbers._replace(table=TableAddress(bits._replace(writes_codes=writes_codes), rule))  # type: ignore[arg-type]
    return variant, (*numbers, *used_bits(bits.carrier, rule.bits, rule.correction))


def _is_fast(bits: GridBits, rule: Rule) -> bool:
    """Whether adding and subtracting a power of two rounds: the power must exist, and leave room for a carry."""
    room = 2 <= bits.shift <= 23 and (bits.top >> 23) + 1 + bits.shift < 254
    # Where numbers overflow, they do so from the value on that would follow the largest.
    # Half of the weight of a 16th random bit takes a 17th.
    fits = not (rule.correction and rule.bits == 16)
    ends = rule.overflow == Overflow.SATURATE or (rule.mode in (Mode.NEAREST, Mode.STOCHASTIC) and bits.top == bits.bottom)
    return bits.carrier == SINGLE and bits.low > 0 and bits.zero and room and ends and fits and rule.mode in _FAST_MODES


def drawn_later(variant: KernelVariant, grid: Grid, few_bits: bool) -> KernelVariant:
    """The variant that draws the last 16 random bits only where they can matter, if there is one; see `triton.device.undecided`.

    Args:
        variant: The variant that `rounding` returned.
        grid: The grid.
        few_bits: Whether values have at most 11 significant bits.
    """
    bits = grid_bits(grid, variant.wide)
    # Near 2**7 or 1.5 times 2**7 spacings, the sums must stay within one binade of float32. This also limits evenly
    # spaced values to at most 2**7; unsigned ones of 8 bits have twice as many.
    end = bits.top if variant.saturates else bits.top + (1 << bits.shift + max(bits.low - (bits.top >> 23), 0))
    room = bits.shift >= 18 or (bits.shift >= 16 and end < bits.low << 23)
    draws = variant.mode == Mode.STOCHASTIC and variant.fast and variant.uses_all and not variant.draws_16
    return variant._replace(draws_late=draws and room and not INTERPRETED, few_bits=few_bits)


def rounds_magnitudes(variant: KernelVariant) -> bool:
    """Whether a rounding saturates and treats both signs alike, and `triton.device.rounding` has it."""
    is_even = variant.mode in (Mode.NEAREST, Mode.TOWARD_ZERO, Mode.STOCHASTIC) and variant.symmetric and variant.keep_sign
    return variant.fast and variant.saturates and is_even


def has_pairs(variant: KernelVariant, coding: CodeVariant, grid: Grid) -> bool:
    """Whether `triton.device.code_pairs` supports the codes of bfloat16 values, given the variant that `drawn_later` returned."""
    bits = grid_bits(grid, variant.wide)
    is_plain = coding.signed and coding.subnormals and coding.zero and not (coding.twos_complement or coding.nan_is_zero or coding.far)
    return variant.draws_late and _has_values_in_pairs(variant, bits) and is_plain and bits.low <= SINGLE.bias


def _has_values_in_pairs(variant: KernelVariant, bits: GridBits, *, may_overflow: bool = False) -> bool:
    """Whether `triton.device.pairs` rounds to values of a grid, given the variant that `drawn_later` returned."""
    # Values of at most 7 significant bits, normal ones among them, far from float32's own limits.
    fits = bits.shift > 16 and bits.top >= bits.low << 23 and bits.least >= 64 << 23 and bits.top < 192 << 23
    rounds = variant.draws_late or (variant.mode == Mode.NEAREST and variant.fast and not variant.only_powers)
    return supports_packed_16_bit() and rounds and (variant.saturates or may_overflow) and fits and bits.top == bits.bottom


def has_column_pairs(variant: KernelVariant, grid: Grid) -> bool:
    """Whether `triton.device.column_pairs` rounds bfloat16 values, given the variant that `drawn_later` returned."""
    return variant.draws_late and variant.keep_sign and _has_values_in_pairs(variant, grid_bits(grid, variant.wide), may_overflow=True)


def has_scaled_pairs(variant: KernelVariant, grid: Grid) -> bool:
    """Whether `triton.device.scaled_pairs` rounds bfloat16 values under scales, given the variant that `drawn_later` returned."""
    bits = grid_bits(grid, variant.wide)
    # The smallest value times the smallest power of two is a float32.
    return _has_values_in_pairs(variant, bits) and variant.keep_sign and bits.least >= SINGLE.bias - 22 << 23


@lru_cache(maxsize=4096)
def writing(grid: Grid, coding: Coding, wide: bool) -> tuple[CodeVariant, tuple[int, ...]]:
    """The variant and the numbers for writing values as codes, those of `Codes`.

    Args:
        grid: The values.
        coding: Their codes.
        wide: Whether values are float64.
    """
    return _code_variant(grid, coding, wide), _code_numbers(grid, coding, wide, -1)


@lru_cache(maxsize=4096)
def reading(grid: Grid, coding: Coding, wide: bool) -> tuple[CodeVariant, tuple[int, ...]]:
    """The variant and the numbers for reading codes, those of `Codes`.

    Args:
        grid: The values.
        coding: Their codes.
        wide: Use float64 even if float32 is enough.
    """
    wide = grid_bits(grid, wide).carrier == DOUBLE
    return _code_variant(grid, coding, wide), _code_numbers(grid, coding, wide, 1)


def _code_variant(grid: Grid, coding: Coding, wide: bool) -> CodeVariant:
    _, variant = coding_bits(grid, coding, grid_bits(grid, wide))
    empty = (1 << (coding.bits - variant.signed)) - (1 << grid.mantissa)
    return CodeVariant(
        variant,
        apart=variant.infinity and (coding.infinity != empty or variant.nan_is_zero),
        nan=coding.nan >= 0,
        far=_power(grid, coding, wide) > _bias(wide),
        wide=wide,
    )


def _bias(wide: bool) -> int:
    return (DOUBLE if wide else SINGLE).bias


def _power(grid: Grid, coding: Coding, wide: bool) -> int:
    """log2 of the ratio of a value to the number whose shifted pattern is its code; for integers, to their number of steps."""
    return round(math.log2(grid.least)) if coding.twos_complement else grid.exponent + _bias(wide) - 1


def _code_numbers(grid: Grid, coding: Coding, wide: bool, direction: int) -> tuple[int, ...]:
    """The numbers of `values.Codes`, in its order, floats as patterns; `direction` is 1 from codes to values, -1 the other way."""
    bits = grid_bits(grid, wide)
    carrier = bits.carrier
    power = _power(grid, coding, wide)
    first = min(carrier.bias, power)
    unused = (64 if carrier == DOUBLE else 32) - coding.bits
    largest = largest_code(grid, coding)
    return (
        bits.shift,
        grid.exponent + carrier.bias,
        carrier.pattern(2.0 ** (direction * first)),
        carrier.pattern(2.0 ** (direction * (power - first))),
        max(0, unused - bits.shift),
        ~carrier.sign,
        1 << (coding.bits - 1),
        unused,
        1 << grid.mantissa,
        (1 << coding.bits) - 1 if coding.twos_complement else max(largest, coding.infinity),
        coding.infinity,
        coding.nan if coding.nan >= 0 else largest,
    )
