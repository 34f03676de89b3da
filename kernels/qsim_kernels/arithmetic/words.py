"""The vocabulary of the arithmetic, with its meaning for Python's integers.

A number is given by its bits, as a signed integer as wide as its carrier: here float32, and float64 where `constants` are bound to it.
Operators and comparisons are those of integers of that width. Random bits are unsigned words: 32 bits for each element, and in float64's
arithmetic 53, of which the first 32 are random.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from qsim_kernels.numbers.carrier import SINGLE, Carrier

T = TypeVar("T")


def constants(carrier: Carrier) -> dict[str, int]:
    """The constants of a carrier, by their names.

    `MANTISSA` is the number of stored bits of a significand, `BIAS` that of exponents, `SIGN` the sign bit, and `MAGNITUDE` all others,
    which are those of the canonical NaN, too. Magnitudes above `INFINITY` are NaN. `DRAWN` is a word of all random bits of an element,
    `SPARE` how many of them there are beyond those of a significand, and `BEHIND` how many beyond 32. `ONE` is the number 1.
    """
    return {
        "MANTISSA": carrier.mantissa,
        "BIAS": carrier.bias,
        "SIGN": carrier.sign,
        "MAGNITUDE": carrier.nan,
        "INFINITY": carrier.infinity,
        "DRAWN": (1 << carrier.drawn) - 1,
        "SPARE": carrier.drawn - carrier.mantissa - 1,
        "BEHIND": carrier.drawn - 32,
        "ONE": carrier.bias << carrier.mantissa,
    }


def operations(carrier: Carrier) -> dict[str, Callable[..., int]]:
    """Operations of a carrier's numbers, given and returned as bits, rounded to nearest with ties to even.

    Python computes them in float64, which has more than twice as many bits as float32: rounding its results once more is the same.
    """
    number, integer = (ctypes.c_float, ctypes.c_int32) if carrier == SINGLE else (ctypes.c_double, ctypes.c_int64)

    def to_bits(value: float) -> int:
        return integer.from_buffer(number(value)).value

    def from_bits(bits: int) -> float:
        return number.from_buffer(integer(bits)).value

    return {
        "total": lambda a, b: to_bits(from_bits(a) + from_bits(b)),
        "difference": lambda a, b: to_bits(from_bits(a) - from_bits(b)),
        "product": lambda a, b: to_bits(from_bits(a) * from_bits(b)),
        "quotient": lambda a, b: to_bits(from_bits(a) / from_bits(b)),
        "from_integer": to_bits,
    }


MANTISSA, BIAS, SIGN, MAGNITUDE, INFINITY, DRAWN, SPARE, BEHIND, ONE = constants(SINGLE).values()
total, difference, product, quotient, from_integer = operations(SINGLE).values()


def where(condition: bool, chosen: T, other: T) -> T:
    """One of two numbers."""
    return chosen if condition else other


def assuming(condition: bool, x: T) -> T:
    """A number that is used only where a condition holds, which circuits make use of."""
    return x


def minimum(a: int, b: int) -> int:
    """The smaller of two integers."""
    return min(a, b)


def maximum(a: int, b: int) -> int:
    """The larger of two integers."""
    return max(a, b)


def bits_of(x: T) -> T:
    """The bits of a number: itself, where numbers are given by their bits."""
    return x


def from_bits(bits: T) -> T:
    """The number of some bits."""
    return bits


def bit_length(x: int) -> int:
    """The number of bits of an integer that is not negative, without leading zeros."""
    return x.bit_length()


def is_nan(bits: int) -> bool:
    """Whether bits are those of a NaN."""
    return bits & MAGNITUDE > INFINITY


def is_zero(bits: int) -> bool:
    """Whether bits are those of a zero."""
    return bits & MAGNITUDE == 0


def to_word(x: int) -> int:
    """An integer that is not negative as a word of random bits."""
    return x


def to_int(word: int) -> int:
    """A word of fewer bits than the carrier has as an integer of the carrier's width."""
    return word


def to_long(x: int) -> int:
    """An integer or a word in 64 bits."""
    return x


def entry(table: Sequence[int], index: int) -> int:
    """A number of a table in memory, as an integer of the carrier's width."""
    return table[index]


def long_entry(table: Sequence[int], index: int) -> int:
    """A number of a table in memory, in 64 bits."""
    return table[index]


def carries(a: int, b: int) -> bool:
    """Whether the sum of two words of random bits is more than such a word holds."""
    return a + b > DRAWN


def low_word(x: int) -> int:
    """The last 32 bits of a word."""
    return x & 0xFFFFFFFF


def wide_product(a: int, b: int) -> tuple[int, int]:
    """The first and the last 32 bits of the product of two words of 32 bits."""
    return a * b >> 32, a * b & 0xFFFFFFFF


def divide(a: float, b: float) -> float:
    """The quotient of two float32 numbers, correctly rounded."""
    raise NotImplementedError("Python has no float32: bind this word")


def square_root(x: float) -> float:
    """The root of a float32 number, correctly rounded."""
    raise NotImplementedError("Python has no float32: bind this word")


def round_down(x: float) -> float:
    """The largest integer that a float64 number is not below; infinities and NaN are returned."""
    raise NotImplementedError("Python's floor has no infinities: bind this word")


def larger(a: float, b: float) -> float:
    """The larger of two numbers, and NaN if one is."""
    raise NotImplementedError("Python has no float32: bind this word")


def rounded(x: float, inner: object, how: object) -> float:
    """The result of an operation, rounded if arithmetic is in a format."""
    raise NotImplementedError("Python has no float32: bind this word")


def unrolled(count: int) -> Iterable[int]:
    """The numbers below another one, for a loop that compilers unroll."""
    return range(count)
