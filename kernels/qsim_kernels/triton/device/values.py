"""The values passed between jitted functions: a grid in the carrier's bits, the source of random bits, and the compiled variant."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import GridNumbers, RoundingNumbers, UsedBits, Variant
from qsim_kernels.numbers.encoding import CodingVariant
from qsim_kernels.numbers.grid import Overflow


class KernelVariant(NamedTuple):
    """The compile-time variant of a kernel. Everything else about formats and roundings is passed at run time.

    Attributes:
        rounding: The facts of the rounding, which are attributes of a kernel's variant, too.
        fast: Whether `round_single` supports the grid and the rounding.
        wide: Whether the carrier is float64; otherwise float32.
        draws_16: Whether 16 random bits are drawn per element; otherwise 32.
        uses_all: Whether all of those are used, without a correction.
        only_powers: Whether the grid holds only powers of two, and ties occur.
        draws_late: Whether the last 16 of 32 random bits are drawn only by threads that may need them; see `undecided`.
        few_bits: Whether values have so few significant bits that the first 16 decide above the grid's smallest value.
        in_pairs: Whether codes of values are found two at a time; see `pairs`.
        fills_byte: Whether codes that are found in pairs have eight bits.
        width: Of a table in float32's bits, the number of those that do not choose a bucket.
        steps: The steps of bisection within a bucket. `table` is then the logarithm of the length of a row in memory.
    """

    rounding: Variant
    fast: bool
    wide: bool
    draws_16: bool
    uses_all: bool
    only_powers: bool
    draws_late: bool = False
    few_bits: bool = False
    in_pairs: bool = False
    fills_byte: bool = False
    width: int = 0
    steps: int = 0

    @property
    def saturates(self) -> bool:
        """Whether overflow goes to a value of the grid."""
        return self.rounding.overflow != Overflow.NONFINITE

    def __getattr__(self, name: str) -> Any:
        """A fact of the rounding."""
        return getattr(self.rounding, name)


class CodeVariant(NamedTuple):
    """The compile-time variant of a kernel that reads or writes codes.

    Attributes:
        coding: The facts of the coding, which are attributes of a kernel's variant, too.
        apart: Whether infinity and NaN have codes of their own, instead of the top exponent's.
        nan: Whether a code of NaN exists.
        far: Whether the grid's exponents are so far from the carrier's that converting between them takes two factors.
        wide: Whether the carrier is float64; otherwise float32.
    """

    coding: CodingVariant
    apart: bool
    nan: bool
    far: bool
    wide: bool

    def __getattr__(self, name: str) -> bool:
        """A fact of the coding."""
        return getattr(self.coding, name)  # type: ignore[no-any-return]


class Codes(NamedTuple):
    """How values are written as codes, and codes read; kernels take these numbers as 64-bit integers.

    Attributes:
        shift: Mantissa bits of the carrier beyond the grid's.
        lowest: The smallest value's exponent field, where there is no zero.
        scale: Factor from a value to the number whose shifted pattern is the code, or the other way; for integers, to units of the step.
        rest: The remaining factor that one number cannot hold.
        lift: The number of bits by which that pattern is shifted to the top of the carrier's word.
        mask: All bits of the carrier's word but the sign.
        sign: The code's sign bit.
        unused: Bits of the carrier's word that a code does not use.
        binade: The code of the smallest normal value.
        last: The largest code that is not NaN.
        infinity: The code of +infinity.
        nan: The code of NaN, or the code written in its place.
    """

    shift: Any
    lowest: Any
    scale: Any
    rest: Any
    lift: Any
    mask: Any
    sign: Any
    unused: Any
    binade: Any
    last: Any
    infinity: Any
    nan: Any


class Noise(NamedTuple):
    """The source of random bits, and the `UsedBits` of a rounding: of 32 bits, and of float64's width its correction."""

    seed: Any
    stream: Any
    used: Any


class RuntimeRounding(NamedTuple):
    """The grid of a rounding in the carrier's bits, and the `Noise`."""

    grid: Any
    noise: Any


@triton.jit
def as_double(bits):
    """A float64 from its bits as an integer; in the interpreter a small integer is narrower than declared."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def in_carrier(grid, WIDE: tl.constexpr):
    """Convert a grid's int64 patterns to the carrier's width; an address stays."""
    PATTERN: tl.constexpr = tl.int64 if WIDE else tl.int32
    return GridNumbers(
        grid.shift.to(PATTERN), grid.low.to(PATTERN), grid.least.to(PATTERN), grid.half.to(PATTERN), grid.parity.to(PATTERN),
        grid.top.to(PATTERN), grid.bottom.to(PATTERN), grid.floor.to(PATTERN), grid.over.to(PATTERN), grid.under.to(PATTERN),
        grid.table,
    )  # fmt: skip


@triton.jit
def numbers_in_carrier(numbers, WIDE: tl.constexpr):
    """Convert int64 `RoundingNumbers` to the carrier's patterns and the words of its arithmetic."""
    WORD: tl.constexpr = tl.int64 if WIDE else tl.uint32
    used = numbers.used
    return RoundingNumbers(in_carrier(numbers.grid, WIDE), UsedBits(used.keep.to(WORD), used.correction.to(WORD)))


@triton.jit
def rounding_of(seed_pointer, seed, stream, numbers, WIDE: tl.constexpr):
    """Gather what a rounding reads from a kernel's parameters: the seed by pointer or by value, and `RoundingNumbers`."""
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    numbers = numbers_in_carrier(numbers, WIDE)
    return RuntimeRounding(numbers.grid, Noise(seed, stream, numbers.used))


@triton.jit
def codes_in_carrier(coding, shift, WIDE: tl.constexpr):
    """Convert the int64 numbers of codes to the carrier's width and types, given the bits that are rounded away."""
    PATTERN: tl.constexpr = tl.int64 if WIDE else tl.int32
    CARRIER: tl.constexpr = tl.float64 if WIDE else tl.float32
    return Codes(
        shift.to(PATTERN), coding.lowest.to(PATTERN), coding.scale.to(PATTERN).to(CARRIER, bitcast=True),
        coding.rest.to(PATTERN).to(CARRIER, bitcast=True), coding.lift.to(PATTERN), coding.mask.to(PATTERN), coding.sign.to(PATTERN),
        coding.unused.to(PATTERN), coding.binade.to(PATTERN), coding.last.to(PATTERN), coding.infinity.to(PATTERN), coding.nan.to(PATTERN),
    )  # fmt: skip
