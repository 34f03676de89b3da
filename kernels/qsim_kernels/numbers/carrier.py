"""The float types in which rounding is computed, and grids expressed in their bit patterns.

A carrier holds every value of a grid and every input exactly. Float32 suffices for nearly all of them. Where a grid reaches below float32's
normal range, or the input is float64, the same steps run on float64.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any, NamedTuple

from qsim_kernels.numbers.grid import Coding, Grid, Mode, Rule, draws
from qsim_kernels.numbers.tables import steps_of


class Carrier(NamedTuple):
    """A binary float type: `mantissa` stored bits and an exponent `bias`, one less than a power of two.

    Kernels compute in `SINGLE` and `DOUBLE`. Circuits also have narrower ones, which are given normal numbers only.
    """

    mantissa: int
    bias: int

    @property
    def drawn(self) -> int:
        """The number of bits in the word of an element's random bits: 32, or as many as float64's arithmetic can use."""
        return max(32, self.mantissa + 1)

    @property
    def last(self) -> int:
        """The index of the sign bit: an arithmetic right shift by it copies the sign into every bit."""
        return 31 if self.mantissa == 23 else 63

    @property
    def infinity(self) -> int:
        """The bits of +infinity; every magnitude above it is NaN."""
        return (2 * self.bias + 1) << self.mantissa

    @property
    def nan(self) -> int:
        """The bits of the canonical output NaN: positive, all bits set, as NVIDIA's arithmetic writes it."""
        return ~self.sign

    @property
    def sign(self) -> int:
        """The sign bit as a signed integer."""
        return -(self.infinity + (1 << self.mantissa))

    def pattern(self, value: float) -> int:
        """The bits of a magnitude that the carrier holds exactly."""
        form, word = ("<f", "<I") if self == SINGLE else ("<d", "<Q")
        bits: int = struct.unpack(word, struct.pack(form, abs(value)))[0]
        if self in (SINGLE, DOUBLE) or bits == 0:
            return bits
        return (bits >> DOUBLE.mantissa - self.mantissa) - (DOUBLE.bias - self.bias << self.mantissa)

    def bits(self, value: float) -> int:
        """The bits of the carrier's number next to a number, as a signed integer."""
        bits = self.pattern(value)
        return bits + self.sign if value < 0 else bits

    def number(self, bits: int) -> float:
        """The number of some bits, a signed integer."""
        return self.value(bits) if bits >= 0 else -self.value(bits - self.sign)

    def value(self, pattern: int) -> float:
        """The magnitude of some bits."""
        form, word = ("<f", "<I") if self.mantissa == 23 else ("<d", "<Q")
        value: float = struct.unpack(form, struct.pack(word, pattern))[0]
        return value


SINGLE = Carrier(23, 127)
DOUBLE = Carrier(52, 1023)


def double_bits(x: float) -> int:
    """The bits of a float64, as a signed integer.

    Example:
        >>> hex(double_bits(1.0))
        '0x3ff0000000000000'
    """
    bits: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return bits


class GridNumbers(NamedTuple):
    """The numbers of a grid that code reads when it rounds; see `GridBits`. `table` is the address of a table in memory, or 0."""

    shift: Any
    low: Any
    least: Any
    half: Any
    parity: Any
    top: Any
    bottom: Any
    floor: Any
    over: Any
    under: Any
    table: int


class GridBits(NamedTuple):
    """A grid in the bits of a carrier.

    Attributes:
        carrier: The carrier.
        shift: How many low bits of the carrier's pattern are rounded away in the grid's normal range.
        low: The exponent field below which `shift` grows by one per binade; 0 if it never does.
        least: Bits of the smallest positive value; magnitudes below it go to it or to zero. 0 where no special case is needed.
        half: Bits of half of it.
        parity: The bit to flip in a pattern so that its last kept bit is the last bit of the grid's code; 0 if none.
        top: Bits of the largest value.
        bottom: Bits of the largest magnitude below zero; 0 for unsigned grids.
        floor: Bits of the result for saturated negative values.
        over: Bits of the result for overflow above the largest value.
        under: The same below the smallest.
        signed: Whether negative values exist.
        negative_zero: Whether zero keeps its sign.
        zero: Whether zero is in the grid.
        table: The text of a table, in place of which rounding gets its numbers in memory; empty for other grids.
        writes_codes: Whether results of rounding onto a table are codes in place of values.
        flush: Whether magnitudes below the smallest value become zero whatever the rounding.
    """

    carrier: Carrier
    shift: int
    low: int
    least: int
    half: int
    parity: int
    top: int
    bottom: int
    floor: int
    over: int
    under: int
    signed: bool
    negative_zero: bool
    zero: bool
    table: Any = ""
    writes_codes: bool = False
    flush: bool = False

    def numbers(self, table: int = 0) -> GridNumbers:
        """The numbers that code reads when it rounds, with the address of a table in memory."""
        return GridNumbers._make((*(getattr(self, name) for name in GridNumbers._fields[:-1]), table))

    def limit(self, rule: Rule) -> int:
        """Bits of a magnitude that rounds as all above it: the largest value, or the next one of its spacing, from which numbers overflow.

        NaN where there is no such magnitude.
        """
        if rule.saturates:
            return self.top
        is_even = self.signed and self.top == self.bottom and self.top >> self.carrier.mantissa >= self.low
        return min(self.top + (1 << self.shift), self.carrier.nan) if is_even else self.carrier.nan

    @property
    def is_open(self) -> bool:
        """Whether the next value above the largest and below the smallest is the carrier's infinity, to which overflow goes."""
        infinity = self.carrier.infinity
        return self.top == self.bottom and self.top + (1 << self.shift) == infinity and self.over == self.under == infinity


def fits_single(grid: Grid) -> bool:
    """Whether rounding can work on float32's bits: the grid's own binades are normal numbers there, with room to scale below them."""
    if grid.exponent < 1 - SINGLE.bias or max(grid.max, -grid.min) >= 2.0**128:
        return False
    return is_flat(grid, SINGLE) or grid.least >= math.ldexp(1.0, SINGLE.drawn + 1 - SINGLE.bias)


def is_flat(grid: Grid, carrier: Carrier) -> bool:
    """Whether the spacing never grows relative to a carrier's: below the grid's lowest binade both are evenly spaced."""
    return grid.exponent == 1 - carrier.bias and grid.least < math.ldexp(1.0, grid.exponent)


def counts_wide(grid: Grid, coding: Coding) -> bool:
    """Whether codes must be computed in float64.

    This is so for integers in steps so small that float32 cannot hold the number of steps in one, and for integers with so many bits that
    it cannot hold the largest.
    """
    return coding.twos_complement and (is_flat(grid, SINGLE) or grid.mantissa > SINGLE.mantissa + 1)


def bits_that_matter(how: GridBits, rule: Rule) -> int:
    """The number of a rounding's random bits that can change a result.

    Where at most 16 bits of every pattern are rounded away, as from float32 to bfloat16, later random bits would be added to zeros.
    """
    few = how.least == 0 and how.shift <= 16 and not rule.correction
    return min(rule.bits, 16) if few else rule.bits


@lru_cache(maxsize=4096)
def grid_bits(grid: Grid, wide: bool) -> GridBits:
    """Express a grid in the bits of a carrier.

    Args:
        grid: The values.
        wide: Use float64 even if float32 is enough, because the input is float64.
    """
    return grid_in(DOUBLE if wide or not (grid.table or fits_single(grid)) else SINGLE, grid)


def grid_in(carrier: Carrier, grid: Grid) -> GridBits:
    """Express a grid in the bits of a carrier that can hold it."""
    flat = is_flat(grid, carrier)
    # A grid of integers may have one bit more than the carrier stores: its uppermost binade is spaced like the carrier's own.
    spare = max(0, grid.mantissa - carrier.mantissa)
    mantissa, exponent = grid.mantissa - spare, grid.exponent - spare
    gradual = not (grid.table or grid.flush) and grid.zero and grid.least == math.ldexp(1.0, grid.exponent - grid.mantissa)
    field = exponent + carrier.bias
    signed = grid.min < 0
    overflow = carrier.infinity if grid.infinity else carrier.nan
    return GridBits(
        carrier=carrier,
        shift=carrier.mantissa - mantissa,
        low=field if gradual and not flat else 0,
        least=0 if flat else carrier.pattern(grid.least),
        half=0 if flat else carrier.pattern(grid.least / 2),
        parity=((field - mantissa - grid.zero) & 1) << carrier.mantissa,
        top=carrier.pattern(grid.max),
        bottom=carrier.pattern(grid.min) if signed else 0,
        floor=carrier.pattern(grid.min),
        over=overflow,
        under=overflow if signed else carrier.nan,
        signed=signed,
        negative_zero=grid.negative_zero,
        zero=grid.zero,
        table=grid.table,
        flush=grid.flush,
    )


def rounding_bits(grid: Grid, rule: Rule, wide: bool) -> GridBits:
    """A grid in the bits of the carrier in which a rule can round onto it: half the weight of a 32nd random bit takes a 33rd."""
    return grid_bits(grid, wide or (rule.correction and rule.bits == SINGLE.drawn))


class Variant(NamedTuple):
    """The facts of a rounding that are known when code is compiled for it.

    Attributes:
        mode: A `Mode`.
        overflow: An `Overflow`.
        flat: Whether as many bits are cleared of all patterns, and the smallest value is no special case.
        zero: Whether zero is a value.
        signed: Whether negative values exist.
        keep_sign: Whether zero keeps its sign.
        symmetric: Whether the smallest value is the negative of the largest.
        open: Whether overflow becomes infinity by itself.
        flush: Whether magnitudes below the smallest value become zero whatever the mode.
        table: The number of steps of a bisection of a table's places, which decide the facts before it; 0 for other grids.
    """

    mode: int
    overflow: int
    flat: bool
    zero: bool
    signed: bool
    keep_sign: bool
    symmetric: bool
    open: bool
    flush: bool = False
    table: int = 0

    @property
    def draws(self) -> bool:
        """Whether random bits are drawn."""
        return draws(self.mode)


#: Rounding onto a table, whose places hold all other facts.
_TABLE = Variant(0, 0, flat=False, zero=True, signed=True, keep_sign=False, symmetric=False, open=False)


@lru_cache(maxsize=4096)
def variant_of(how: GridBits, rule: Rule) -> Variant:
    """The facts of a rounding onto a grid."""
    if how.table:
        return _TABLE._replace(mode=int(rule.mode), overflow=rule.overflow, table=steps_of(how.table, rule))
    return Variant(
        mode=int(rule.mode),
        overflow=rule.overflow,
        flat=how.low == 0 and how.least == 0,
        zero=how.zero,
        signed=how.signed,
        keep_sign=how.negative_zero,
        symmetric=how.signed and how.top == how.bottom,
        open=not rule.saturates and (rule.mode == Mode.NEAREST or rule.draws) and how.is_open,
        flush=how.flush,
    )


def name_of(variant: Variant) -> str:
    """A name for what is compiled for a variant.

    Example:
        >>> from qsim_kernels.numbers.carrier import Variant, name_of
        >>> name_of(Variant(7, 1, flat=False, zero=True, signed=True, keep_sign=True, symmetric=True, open=False))
        'rounding_7_1_zero_signed_keep_sign_symmetric'
    """
    facts = [name for name, given in zip(Variant._fields[2:-1], variant[2:-1], strict=True) if given]
    return "_".join(["rounding", str(variant.mode), str(variant.overflow), *([f"table_{variant.table}"] if variant.table else facts)])


def read_variant(name: str) -> Variant:
    """The variant with a name.

    Raises:
        AttributeError: If no variant has it.
    """
    start, *parts = name.split("_", 3)
    if start != "rounding" or len(parts) < 2 or not all(map(str.isdigit, parts[:2])):
        raise AttributeError(f"no variant has the name {name!r}")
    mode, overflow, facts = int(parts[0]), int(parts[1]), "".join(parts[2:])
    if facts.startswith("table_"):
        return _TABLE._replace(mode=mode, overflow=overflow, table=int(facts.removeprefix("table_")))
    return Variant(mode, overflow, *(f"_{field}_" in f"_{facts}_" for field in Variant._fields[2:-1]))


class UsedBits(NamedTuple):
    """The random bits that a rounding uses, in the word of all that are drawn.

    Attributes:
        keep: The mask of these among the first 32.
        correction: Half the weight of the last of them, if the rule has a correction.
    """

    keep: Any
    correction: Any


class RoundingNumbers(NamedTuple):
    """The numbers of a rounding: its grid, and which random bits it uses."""

    grid: GridNumbers
    used: UsedBits


@lru_cache(maxsize=4096)
def used_bits(carrier: Carrier, count: int, correction: bool) -> UsedBits:
    """The first `count` of the drawn random bits."""
    return UsedBits((1 << count) - 1 << 32 - count, 1 << carrier.drawn - 1 - count if correction else 0)
