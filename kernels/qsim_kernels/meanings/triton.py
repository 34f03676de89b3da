"""The vocabulary for Triton's blocks: int32 or int64 for bits, uint32 for words, and int64 for those of float64's arithmetic."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from qsim_kernels import arithmetic
from qsim_kernels.arithmetic import words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.meanings.triton_tables import round_to_table
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


# Functions of their own, because Triton's interpreter replaces what it finds in `tl` alone.
@triton.jit
def where(condition, chosen, other):
    """One of two numbers."""
    return tl.where(condition, chosen, other)


@triton.jit
def minimum(a, b):
    """The smaller of two integers."""
    return tl.minimum(a, b)


@triton.jit
def maximum(a, b):
    """The larger of two integers."""
    return tl.maximum(a, b)


@triton.jit
def number_of(bits):
    """The float of some bits."""
    return bits.to(tl.float64 if bits.dtype == tl.int64 else tl.float32, bitcast=True)


@triton.jit
def is_nan(bits):
    """Whether bits are those of a NaN.

    Not by comparing integers: if they come from a conversion, the compiler may remove the sign before it and leave a NaN's undefined.
    """
    value = number_of(bits)
    return value != value


@triton.jit
def is_zero(bits):
    """Whether bits are those of a zero: one instruction less than on integers."""
    return number_of(bits) == 0


@triton.jit
def product(a, b):
    """The product of two numbers, all given by their bits."""
    return (number_of(a) * number_of(b)).to(a.dtype, bitcast=True)


@triton.jit
def quotient(a, b):
    """The quotient of two numbers, correctly rounded, all given by their bits; the first may be a constant."""
    dividend, divisor = number_of(b * 0 + a), number_of(b)
    if divisor.dtype == tl.float64:
        result = dividend / divisor
    else:
        result = tl.div_rn(dividend, divisor)
    return result.to(b.dtype, bitcast=True)


@triton.jit
def to_uint32(x):
    """Convert to 32 bits without a sign."""
    return x.to(tl.uint32)


@triton.jit
def to_int32(x):
    """Convert to 32 bits with a sign."""
    return x.to(tl.int32)


@triton.jit
def to_int64(x):
    """Convert to 64 bits with a sign."""
    return x.to(tl.int64)


@triton.jit
def long_entry(table, index):
    """A number of a table of 64-bit numbers at an address."""
    return tl.load(table.to(tl.pointer_type(tl.int64)) + index)


@triton.jit
def carries_single(a, b):
    """Whether the sum of two words of 32 bits has one more."""
    return a + b < a


@triton.jit
def carries_double(a, b):
    """Whether the sum of two words of 53 bits has one more."""
    return (a + b) >> 53 > 0


@triton.jit
def wide_product(a, b: tl.constexpr):
    """Both halves of a product of words: one multiplication, where Triton's own Philox takes two."""
    if INTERPRETED:
        product = a.to(tl.uint64) * b
    else:
        # For a product of 64-bit numbers the compiler would also add the upper halves, which are zero.
        product = tl.inline_asm_elementwise("mul.wide.u32 $0, $1, $2;", "=l,r,r", [a, b], dtype=tl.uint64, is_pure=True, pack=1)
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


def _bound(module: Any, vocabulary: dict[str, Any]) -> Any:
    constant = int if INTERPRETED else tl.constexpr
    constants = {name: constant(given) if isinstance(given, int) else given for name, given in vocabulary.items()}
    return bound(module, {"tl": tl, **constants}, triton.jit, constant)


_COMMON = {
    "where": where, "minimum": minimum, "maximum": maximum, "is_nan": is_nan, "is_zero": is_zero, "product": product, "quotient": quotient,
}  # fmt: skip
_TABLES = {"to_long": to_int64, "entry": long_entry, "long_entry": long_entry, "unrolled": range if INTERPRETED else tl.static_range}
_SINGLE = {**_COMMON, "to_word": to_uint32, "to_int": to_int32, "carries": carries_single, **words.constants(SINGLE)}
_DOUBLE = {**_COMMON, "to_word": to_int64, "to_int": to_int64, "carries": carries_double, **words.constants(DOUBLE)}

_single_rounding = _bound(arithmetic.rounding, _SINGLE | {"round_to_table": round_to_table})
_double_rounding = _bound(arithmetic.rounding, _DOUBLE | _TABLES | {"place_of": _bound(arithmetic.tables, _DOUBLE | _TABLES).place_of})
_round_single, _round_double = _single_rounding.round_bits, _double_rounding.round_bits
_random_single, _random_double = _single_rounding.random_bits, _double_rounding.random_bits
#: The functions of `arithmetic.scales` for float32 elements, and the one that computes scales.
elements = _bound(arithmetic.scales, _SINGLE)
scale_of = _bound(arithmetic.scales, _DOUBLE | {"round_bits": _round_double}).scale_of
philox = _bound(
    arithmetic.philox, {"low_word": to_uint32, "wide_product": wide_product, "unrolled": range if INTERPRETED else tl.static_range}
).philox

#: The functions of `arithmetic.mixing` for blocks of int64 bits and indices, and uint32 words.
mixing = _bound(arithmetic.mixing, {"low_word": to_uint32})


def sums(vocabulary: dict[str, Any]) -> Any:
    """The functions of `arithmetic.sums` for float32 running sums.

    Args:
        vocabulary: Functions that go through the terms of a step, add or round, in place of the defined ones.
    """
    return _bound(
        arithmetic.sums, {**_COMMON, "bits_of": bits_of_single, "is_zero": is_zero_single, **words.constants(SINGLE), **vocabulary}
    )


@triton.jit
def is_zero_single(bits):
    """Whether bits are those of a zero: the comparison of floats takes no other operation."""
    return bits.to(tl.float32, bitcast=True) == 0.0


@triton.jit
def bits_of_single(x):
    """The bits of float32 numbers."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def round_bits(bits, drawn, grid, ROUNDING: tl.constexpr):
    """`arithmetic.rounding.round_bits` in float32's or, if `ROUNDING.wide`, in float64's bits."""
    if ROUNDING.wide:
        return _round_double(bits, drawn, grid, ROUNDING)
    else:
        return _round_single(bits, drawn, grid, ROUNDING)


@triton.jit
def random_bits(words, used, ROUNDING: tl.constexpr):
    """`arithmetic.rounding.random_bits` for words of 32 bits, in float32's or, if `ROUNDING.wide`, in float64's arithmetic."""
    if ROUNDING.wide:
        return _random_double(words.to(tl.int64), used)
    else:
        return _random_single(words, used)
