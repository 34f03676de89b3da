"""The values that kernels pass to one another: a grid in the carrier's bits, the random bits' origin, and the compiled variant."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Variant(NamedTuple):
    """What a kernel is compiled for. All else about formats and roundings comes at run time.

    Attributes:
        mode: A `Mode`.
        saturate: Whether what overflows goes to the largest value.
        fast: Whether `round_single` serves the grid and the rounding.
        flat: Whether the number of rounded bits is the same for all values.
        open: Whether what overflows becomes an infinity by itself: above the grid's last binade is the carrier's infinity.
        symmetric: Whether the smallest value is the negative of the largest.
        zero: Whether zero is a value.
        signed: Whether negative values exist.
        keep_sign: Whether zero keeps its sign.
        wide: Whether the carrier is float64; otherwise float32.
        halves: Whether 16 random bits are drawn per element; otherwise 32.
        whole: Whether all of those are used, with nothing behind them.
        later: Whether the last 16 of 32 random bits are drawn only by threads that may need them; see `later`.
        few: Whether values have so few significant bits that the first 16 decide above the grid's smallest value.
        binary: Whether the grid holds powers of two alone, and ties are met.
    """

    mode: int
    saturate: bool
    fast: bool
    flat: bool
    open: bool
    symmetric: bool
    zero: bool
    signed: bool
    keep_sign: bool
    wide: bool
    halves: bool
    whole: bool
    binary: bool
    later: bool = False
    few: bool = False


class CodeVariant(NamedTuple):
    """What a kernel that reads or writes codes is compiled for.

    Attributes:
        twos_complement: Codes are integers; otherwise sign and magnitude.
        zero: Whether zero is a value.
        subnormals: Whether values lie between zero and the smallest normal.
        signed: Whether negative values exist.
        infinity: Whether codes of the infinities are met.
        nan: Whether a code of NaN exists.
        nan_is_zero: Whether that is the code of negative zero.
        far: Whether the grid's exponents are so far from the carrier's that it takes two factors to go from the ones to the others.
        wide: Whether the carrier is float64; otherwise float32.
    """

    twos_complement: bool
    zero: bool
    subnormals: bool
    signed: bool
    infinity: bool
    nan: bool
    nan_is_zero: bool
    far: bool
    wide: bool


class Numbers(NamedTuple):
    """A grid as patterns of the carrier, and the scale as a float of it; the names are those of `carrier.Plan`."""

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
    scale: Any


class Codes(NamedTuple):
    """How values are written as codes, and codes read.

    Attributes:
        shift: Mantissa bits of the carrier beyond the grid's.
        lowest: The smallest value's exponent field, where there is no zero.
        scale: Takes a value to the number whose pattern, shifted, is the code, or the other way; for integers, to units of the step.
        rest: What of that factor one number cannot hold.
        lift: By how many bits that pattern is shifted to the top of the carrier's word.
        mask: All bits of the carrier's word but the sign.
        sign: The code's sign bit.
        unused: Bits of the carrier's word that a code leaves.
        binade: The code of the smallest normal value.
        last: The largest code that is not NaN.
        infinity: The code of +infinity.
        nan: The code of NaN, or what is written in its place.
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
    """Where random bits come from and what is made of them.

    Attributes:
        seed: 64 bits.
        stream: 64 bits.
        keep: Mask of the random bits that the rounding uses.
        correction: What stands behind the last of them.
        late: What stands behind 32 of them, in the arithmetic of float64.
    """

    seed: Any
    stream: Any
    keep: Any
    correction: Any
    late: Any


@triton.jit
def as_numbers(shift, low, least, half, parity, top, bottom, floor, over, under, scale, WIDE: tl.constexpr):
    """Patterns that came as int64, in the carrier's width; the scale as a float."""
    PATTERN: tl.constexpr = tl.int64 if WIDE else tl.int32
    CARRIER: tl.constexpr = tl.float64 if WIDE else tl.float32
    return Numbers(
        shift.to(PATTERN), low.to(PATTERN), least.to(PATTERN), half.to(PATTERN), parity.to(PATTERN), top.to(PATTERN), bottom.to(PATTERN),
        floor.to(PATTERN), over.to(PATTERN), under.to(PATTERN), scale.to(PATTERN).to(CARRIER, bitcast=True),
    )  # fmt: skip


@triton.jit
def as_codes(shift, lowest, scale, rest, lift, mask, sign, unused, binade, last, infinity, nan, WIDE: tl.constexpr):
    """What came as int64, in the carrier's width and types."""
    PATTERN: tl.constexpr = tl.int64 if WIDE else tl.int32
    CARRIER: tl.constexpr = tl.float64 if WIDE else tl.float32
    return Codes(
        shift.to(PATTERN), lowest.to(PATTERN), scale.to(PATTERN).to(CARRIER, bitcast=True), rest.to(PATTERN).to(CARRIER, bitcast=True),
        lift.to(PATTERN), mask.to(PATTERN), sign.to(PATTERN), unused.to(PATTERN),
        binade.to(PATTERN), last.to(PATTERN), infinity.to(PATTERN), nan.to(PATTERN),
    )  # fmt: skip
