"""A rounding to codes, in one text, and the integers in which codes are written."""

from __future__ import annotations

from functools import lru_cache
from math import frexp
from typing import Any, NamedTuple

import torch

from qsim_kernels.numbers.carrier import GridBits
from qsim_kernels.numbers.grid import BAR, Coding, Grid, GridRounding, Rule, read
from qsim_kernels.numbers.tables import read_table


class Encoding(NamedTuple):
    """A rounding to codes.

    Attributes:
        grid: The values to choose from.
        rule: How to choose.
        coding: The values' codes.
    """

    grid: Grid
    rule: Rule
    coding: Coding

    @property
    def rounding(self) -> GridRounding:
        """The rounding to their values."""
        return GridRounding(self.grid, self.rule)

    @property
    def is_stochastic(self) -> bool:
        """Whether it draws random bits."""
        return self.rule.draws


def spell_encoding(grid: str, rule: str, coding: str) -> str:
    """The text of an encoding, from those of its parts.

    Example:
        >>> spell_encoding("a grid", "a rule", "a coding")
        'a grid | a rule | a coding'
    """
    return f"{grid}{BAR}{rule}{BAR}{coding}"


def read_encoding(text: str) -> Encoding:
    """Parse the output of `spell_encoding`.

    Example:
        >>> from qsim_kernels.numbers.grid import Coding, Rule, spell
        >>> from qsim_kernels.numbers.sums import SINGLE_GRID
        >>> how = spell_encoding(*map(spell, (SINGLE_GRID, Rule(0, 0, False, 0), Coding(32, False, -1, -1))))
        >>> read_encoding(how).is_stochastic
        False
    """
    encoding: Encoding = read(Encoding, text)
    return encoding


def code_dtype(bits: int) -> torch.dtype:
    """The dtype for codes of a given width.

    Example:
        >>> code_dtype(4)
        torch.uint8
    """
    return torch.uint8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32 if bits <= 32 else torch.int64


class CodingVariant(NamedTuple):
    """The facts of a coding that are known when code is compiled for it.

    Attributes:
        twos_complement: Whether codes are integers; otherwise they are sign and magnitude.
        zero: Whether zero is a value.
        subnormals: Whether there are values between zero and the smallest normal.
        signed: Whether negative values exist.
        infinity: Whether infinities have codes.
        nan_is_zero: Whether the code of NaN is that of negative zero.
    """

    twos_complement: bool
    zero: bool
    subnormals: bool
    signed: bool
    infinity: bool
    nan_is_zero: bool


class CodingBits(NamedTuple):
    """A coding in the bits of a carrier.

    Attributes:
        shift: How many low bits of the carrier's significand the grid does not have.
        lowest: The exponent field of the smallest normal value.
        before: What is subtracted from the other bits of a normal value, so that codes begin at zero.
        least: The bits of the smallest step.
        most: Bits of the largest magnitude.
        sign: The sign bit of a code.
        mask: The other bits; of an integer all bits.
        last: The code of the largest value.
        infinity: The code of +infinity, or -1.
        nan: The code of NaN, or the one that is written for it.
    """

    shift: Any
    lowest: Any
    before: Any
    least: Any
    most: Any
    sign: Any
    mask: Any
    last: Any
    infinity: Any
    nan: Any


@lru_cache(maxsize=4096)
def coding_bits(grid: Grid, coding: Coding, how: GridBits) -> tuple[CodingBits, CodingVariant]:
    """Express a coding in the bits of a carrier.

    Args:
        grid: The values.
        coding: Their codes.
        how: The values in the carrier's bits.
    """
    carrier, last = how.carrier, largest_code(grid, coding)
    # Integers may have one bit more than the carrier's significands.
    lowest = grid.exponent + carrier.bias - max(0, grid.mantissa - carrier.mantissa)

    def wrapped(bits: int) -> int:
        """Bits of a code as an integer of the carrier's width, which has a sign."""
        return bits + 2 * carrier.sign if bits >= -carrier.sign else bits

    numbers = CodingBits(
        shift=how.shift,
        lowest=lowest,
        before=(lowest - grid.zero) << grid.mantissa,
        least=carrier.pattern(2.0 ** (grid.exponent - grid.mantissa)),
        most=max(how.top, how.bottom),
        sign=wrapped(1 << coding.bits - 1),
        mask=wrapped((1 << coding.bits - (how.signed and not coding.twos_complement)) - 1),
        last=last,
        infinity=coding.infinity,
        nan=coding.nan if coding.nan >= 0 else last,
    )
    variant = CodingVariant(
        twos_complement=coding.twos_complement,
        zero=grid.zero,
        subnormals=grid.zero and grid.least < 2.0**grid.exponent,
        signed=how.signed,
        infinity=coding.infinity >= 0,
        nan_is_zero=how.signed and coding.nan == 1 << coding.bits - 1,
    )
    return numbers, variant


def largest_code(grid: Grid, coding: Coding) -> int:
    """The code of the largest value."""
    if grid.table:
        return read_table(grid.table).codes[-1]
    if coding.twos_complement:
        return round(grid.max / grid.least)
    if grid.max < 2.0**grid.exponent:
        return round(grid.max / 2.0 ** (grid.exponent - grid.mantissa))
    fraction, exponent = frexp(grid.max)
    return ((exponent - 1 - grid.exponent + grid.zero) << grid.mantissa) + round((2 * fraction - 1) * (1 << grid.mantissa))
