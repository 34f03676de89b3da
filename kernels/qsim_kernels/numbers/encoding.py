"""A rounding to codes, in one text, and the integers in which codes are written."""

from __future__ import annotations

from functools import lru_cache
from math import frexp
from typing import Any, NamedTuple

import torch

from qsim_kernels.numbers.carrier import GridBits
from qsim_kernels.numbers.grid import Coding, Grid, Mode, Rule, read

_BAR = " | "


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
    def is_stochastic(self) -> bool:
        """Whether it draws random bits."""
        return self.rule.mode == Mode.STOCHASTIC


def spell_encoding(grid: str, rule: str, coding: str) -> str:
    """The text of an encoding, from those of its parts.

    Example:
        >>> spell_encoding("a grid", "a rule", "a coding")
        'a grid | a rule | a coding'
    """
    return f"{grid}{_BAR}{rule}{_BAR}{coding}"


def parts_of(text: str) -> tuple[str, str, str]:
    """The texts of an encoding's parts."""
    grid, rule, coding = text.split(_BAR)
    return grid, rule, coding


@lru_cache(maxsize=4096)
def read_encoding(text: str) -> Encoding:
    """Parse the output of `spell_encoding`.

    Example:
        >>> from qsim_kernels.numbers.grid import Coding, Rule, spell
        >>> from qsim_kernels.numbers.sums import SINGLE_GRID
        >>> how = spell_encoding(*map(spell, (SINGLE_GRID, Rule(0, 0, False, 0), Coding(32, False, -1, -1))))
        >>> read_encoding(how).is_stochastic
        False
    """
    grid, rule, coding = parts_of(text)
    return Encoding(read(Grid, grid), read(Rule, rule), read(Coding, coding))


def code_dtype(bits: int) -> torch.dtype:
    """The dtype for codes of a given width.

    Example:
        >>> code_dtype(4)
        torch.uint8
    """
    return torch.uint8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32


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
        before: What is subtracted from the other bits of a normal value, so that codes begin at zero.
        lowest: The exponent field of the smallest normal value.
        unit: The exponent field at which a significand counts the grid's smallest steps.
        least: The bits of such a step.
        most: Bits of the largest magnitude.
        mask: All bits of a code.
        sign: The sign bit of a code.
        numbers: The other bits.
        binade: The code of the smallest normal value.
        last: The code of the largest value.
        infinity: The code of +infinity, or -1.
        nan: The code of NaN, or the one that is written for it.
    """

    shift: Any
    before: Any
    lowest: Any
    unit: Any
    least: Any
    most: Any
    mask: Any
    sign: Any
    numbers: Any
    binade: Any
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
    lowest = grid.exponent + carrier.bias
    step = grid.least if coding.twos_complement else 2.0 ** (grid.exponent - grid.mantissa)
    width = carrier.last + 1

    def signed(bits: int) -> int:
        """Bits as an integer of the carrier's width."""
        return (bits + (1 << width - 1)) % (1 << width) - (1 << width - 1)

    numbers = CodingBits(
        shift=how.shift,
        before=(lowest - grid.zero) << grid.mantissa,
        lowest=lowest,
        unit=frexp(step)[1] - 1 + carrier.bias + carrier.mantissa,
        least=carrier.pattern(step),
        most=max(how.top, how.bottom),
        mask=signed((1 << coding.bits) - 1),
        sign=signed(1 << coding.bits - 1),
        numbers=signed((1 << coding.bits - how.signed) - 1),
        binade=1 << grid.mantissa,
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
    if coding.twos_complement:
        return round(grid.max / grid.least)
    if grid.max < 2.0**grid.exponent:
        return round(grid.max / 2.0 ** (grid.exponent - grid.mantissa))
    fraction, exponent = frexp(grid.max)
    return ((exponent - 1 - grid.exponent + grid.zero) << grid.mantissa) + round((2 * fraction - 1) * (1 << grid.mantissa))
