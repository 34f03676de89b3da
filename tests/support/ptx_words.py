"""The meaning of PTX's instructions for NumPy's arrays of words: written from NVIDIA's manual, without the library.

A register of 32 bits is `uint32`, one of 64 bits `uint64`, one of 16 bits `uint16`, whatever it holds; predicates are booleans. A pair is a
word of two bfloat16 numbers or two integers of 16 bits, the first in the lower half. Every NaN that an instruction computes is the
canonical one, as the manual says of bfloat16, and of float32 except for `abs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Words = Any
Meaning = Callable[..., Words]

NAN, PAIR_NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7FFF)
INFINITY = 0x7F800000
LOWER = np.uint32(0xFFFF)

# Numbers. Sums are float64 numbers that are rounded to odd: then rounding them once more, in any direction, is the same as rounding once.


def to_odd(nearest: Words, error: Words) -> Words:
    """Float64 numbers with what exact ones have beyond them, as numbers whose last bit is 1 if they are not exact."""
    bits = nearest.view(np.int64)
    is_open = np.isfinite(nearest) & np.isfinite(error) & (error != 0)
    inward = bits - (is_open & (np.signbit(error) != np.signbit(nearest)))
    return np.where(is_open, inward | 1, bits).view(np.float64)


def error_of_sum(a: Words, b: Words, total: Words) -> Words:
    """The sum of two float64 numbers less their rounded one: exact."""
    other = total - a
    return (a - (total - other)) + (b - other)


def exact_sum(a: Words, b: Words) -> Words:
    """The sum of two float64 numbers, rounded to odd."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        return to_odd(total, error_of_sum(a, b, total))


def directed(nearest: Words, is_above: Words, is_below: Words, direction: str) -> Words:
    """The nearest numbers of a dtype or their neighbours in a direction of PTX, given where they are above and below exact ones."""
    dtype = nearest.dtype
    down, up = (np.nextafter(nearest, dtype.type(end)) for end in (-np.inf, np.inf))
    toward_zero = np.where(nearest > 0, np.where(is_above, down, nearest), np.where(is_below, up, nearest))
    ways = {"rn": nearest, "rz": toward_zero, "rm": np.where(is_above, down, nearest), "rp": np.where(is_below, up, nearest)}
    return ways[direction]


def numbers(word: Words) -> Words:
    """Float32 numbers as float64."""
    with np.errstate(invalid="ignore"):
        return np.asarray(word, np.uint32).view(np.float32).astype(np.float64)


def single(x: Words, direction: str = "rn") -> Words:
    """Float64 numbers, rounded to float32."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        nearest = x.astype(np.float32)
        back = nearest.astype(np.float64)
        result = directed(nearest, back > x, back < x, direction)
    return np.where(np.isnan(x), NAN, result.view(np.uint32))


def halves(pair: Words) -> tuple[Words, Words]:
    """The two halves of words."""
    return pair & LOWER, pair >> np.uint32(16)


def packed(first: Words, second: Words) -> Words:
    """Words of two halves."""
    return (first | second << np.uint32(16)).astype(np.uint32)


def bfloat16(x: Words, *, clamps: bool = False) -> Words:
    """Float64 numbers, rounded to bfloat16 with ties to even."""
    inward = single(x, "rz")
    bits = inward | (numbers(inward) != x)
    bits = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & 1)) >> np.uint32(16)
    if clamps:
        bits = bits - (bits & 0x7FFF == INFINITY >> 16)
    return np.where(np.isnan(x), PAIR_NAN, bits).astype(np.uint32)


def of_pairs(function: Meaning) -> Meaning:
    """An instruction on pairs of bfloat16 numbers, from a function of float64 numbers."""

    def instruction(*pairs: Words) -> Words:
        operands = zip(*((numbers(half << np.uint32(16)) for half in halves(pair)) for pair in pairs), strict=True)
        return packed(*(bfloat16(function(*each)) for each in operands))

    return instruction


def of_halves(function: Meaning, *, signed: bool = False) -> Meaning:
    """An instruction on pairs of integers, from a function of integers."""

    def instruction(*pairs: Words) -> Words:
        kind = np.int16 if signed else np.uint16
        operands = zip(*((half.astype(np.uint16).view(kind) for half in halves(pair)) for pair in pairs), strict=True)
        return packed(*(function(*each).view(np.uint16).astype(np.uint32) for each in operands))

    return instruction


def relu(x: Words) -> Words:
    """Numbers, and zero in place of negative ones."""
    return np.where(x < 0, 0.0, x)


def order(half: Words) -> Words:
    """Integers in the order of bfloat16 numbers, where -0 is below +0."""
    magnitude = (half & np.uint32(0x7FFF)).astype(np.int32)
    return np.where(half & np.uint32(0x8000), -magnitude - 1, magnitude)


def chosen_halves(larger: bool, *, keeps_nan: bool = False, by_magnitude: bool = False) -> Meaning:
    """A minimum or a maximum of bfloat16 numbers.

    Args:
        larger: Whether it is the maximum.
        keeps_nan: Whether NaN is the result if one operand is; otherwise the other one is, if that is a number.
        by_magnitude: Whether magnitudes are compared, and the result has the product of the signs.
    """

    def of_half(a: Words, b: Words) -> Words:
        a_nan, b_nan = (half & np.uint32(0x7FFF) > 0x7F80 for half in (a, b))
        sign = (a ^ b) & np.uint32(0x8000)
        if by_magnitude:
            a, b = a & np.uint32(0x7FFF), b & np.uint32(0x7FFF)
        result = np.where((order(a) > order(b)) == larger, a, b)
        if not keeps_nan:
            result = np.where(a_nan, b, np.where(b_nan, a, result))
        if by_magnitude:
            result = result | sign
        return np.where((a_nan | b_nan) if keeps_nan else (a_nan & b_nan), PAIR_NAN, result)

    return lambda a, b: packed(*(of_half(x, y) for x, y in zip(halves(a), halves(b), strict=True)))


def minimum_or_nan(a: Words, b: Words) -> Words:
    """The smaller of two float32 numbers; NaN if one is."""
    return single(np.minimum(numbers(a), numbers(b)))


def fused(direction: str) -> Meaning:
    """A product plus a number, float32, rounded once."""
    return lambda a, b, c: single(exact_sum(numbers(a) * numbers(b), numbers(c)), direction)


def _double(x: Words) -> Words:
    return np.where(np.isnan(x), np.uint64(0x7FF8000000000000), np.asarray(x, np.float64).view(np.uint64))


def wide_sum(a: Words, b: Words, direction: str) -> Words:
    """The sum of two float64 numbers, rounded once."""
    with np.errstate(invalid="ignore"):
        total = a + b
        error = np.where(np.isfinite(total), error_of_sum(a, b, total), 0)
        return _double(directed(total, error < 0, error > 0, direction))


def wide_fused(direction: str) -> Meaning:
    """A product plus a number, float64, where the product is exact."""

    def instruction(a: Words, b: Words, c: Words) -> Words:
        a, b, c = (each.view(np.float64) for each in (a, b, c))
        assert all((each.astype(np.float32) == each).all() for each in (a, b)), "factors of float32's values have exact products"
        return wide_sum(a * b, c, direction)

    return instruction


def whole_part(x: Words) -> Words:
    """The integer part of a float32 number among those of a word; zero for NaN."""
    x = np.nan_to_num(numbers(x), nan=0.0, posinf=2.0**40, neginf=0.0)
    return np.clip(np.trunc(x), 0, 2.0**32 - 1).astype(np.uint32)


def to_pair(upper: Words, lower: Words, *, clamps: bool = False) -> Words:
    """Two float32 numbers as a pair, of which the first operand becomes the upper half."""
    return packed(bfloat16(numbers(lower), clamps=clamps), bfloat16(numbers(upper), clamps=clamps))


def to_codes(dtype: Any) -> Meaning:
    """Two float32 numbers as two codes of 8 bits, clamped to the largest value, of which the first operand becomes the upper half."""
    largest, nan = np.float32(ml_dtypes.finfo(dtype).max), np.uint16(0x7F)

    def of_one(word: Words) -> Words:
        x = np.asarray(word, np.uint32).view(np.float32)
        codes = np.clip(np.nan_to_num(x, nan=0.0), -largest, largest).astype(dtype).view(np.uint8).astype(np.uint16)
        return np.where(np.isnan(x), nan, codes)

    return lambda upper, lower: (of_one(upper) << np.uint16(8) | of_one(lower)).astype(np.uint16)


# Integers.


def shifted_left(x: Words, count: Words) -> Words:
    """Bits shifted to the left, none of which are left for 32 and more."""
    return np.where(count < 32, x << np.minimum(count, np.uint32(31)), np.uint32(0))


def shifted_right(x: Words, count: Words) -> Words:
    """Bits shifted to the right."""
    most = np.uint32(8 * x.dtype.itemsize - 1)
    return np.where(count <= most, x >> np.minimum(count, most).astype(x.dtype), x.dtype.type(0))


def logic(a: Words, b: Words, c: Words, table: Words) -> Words:
    """A function of three bits, given its eight values."""
    table = int(np.ravel(table)[0])
    result = np.zeros_like(a | b | c)
    for case in range(8):
        if table >> case & 1:
            result |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return result


def permuted(a: Words, b: Words, selector: Words) -> Words:
    """Four bytes of two words: a digit for each, the last byte's last. A digit's highest bit repeats the byte's sign."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.uint32)
    for place in range(4):
        digit = int(np.ravel(selector)[0]) >> 4 * place & 15
        byte = (both >> np.uint64(8 * (digit & 7)) & np.uint64(0xFF)).astype(np.uint32)
        if digit & 8:
            byte = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        result |= byte << np.uint32(8 * place)
    return result


def sum_of_products(a: Words, b: Words, c: Words) -> Words:
    """A word plus the products of two halves and the two lower bytes of another word."""
    first, second = halves(a)
    return c + first * (b & np.uint32(0xFF)) + second * (b >> np.uint32(8) & np.uint32(0xFF))


#: What instructions compute from their operands, by their names. `ptx` has those that exchange words, compare, branch or split registers.
MEANINGS: dict[str, Meaning] = {
    **dict.fromkeys(("mov.b32", "mov.u32", "mov.f32", "mov.b64"), lambda x: x),
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "not.b32": np.invert,
    "add.u32": np.add,
    "sub.u32": np.subtract,
    "min.u32": np.minimum,
    "max.u32": np.maximum,
    "mul.lo.u32": np.multiply,
    "mul.wide.u32": lambda a, b: a.astype(np.uint64) * b.astype(np.uint64),
    "shl.b32": shifted_left,
    "shr.u32": shifted_right,
    "shr.u64": shifted_right,
    "lop3.b32": logic,
    "prmt.b32": permuted,
    "dp2a.lo.u32.u32": sum_of_products,
    "cvt.u32.u64": lambda x: x.astype(np.uint32),
    "cvt.u64.u32": lambda x: x.astype(np.uint64),
    **dict.fromkeys(("selp.b32", "selp.f32", "selp.b64"), lambda a, b, condition: np.where(condition, a, b)),
    **dict.fromkeys(("add.u16x2", "add.s16x2"), of_halves(np.add)),
    "max.u16x2": of_halves(np.maximum),
    "min.u16x2": of_halves(np.minimum),
    "max.s16x2": of_halves(np.maximum, signed=True),
    "min.s16x2": of_halves(np.minimum, signed=True),
    "abs.f32": lambda x: np.where((x & NAN) > INFINITY, NAN, x & NAN),
    **dict.fromkeys(("add.f32", "add.rn.f32"), lambda a, b: single(exact_sum(numbers(a), numbers(b)))),
    **dict.fromkeys(("sub.f32", "sub.rn.f32"), lambda a, b: single(exact_sum(numbers(a), -numbers(b)))),
    **dict.fromkeys(("mul.f32", "mul.rn.f32"), lambda a, b: single(numbers(a) * numbers(b))),
    "add.rz.f32": lambda a, b: single(exact_sum(numbers(a), numbers(b)), "rz"),
    "add.rz.f64": lambda a, b: wide_sum(a.view(np.float64), b.view(np.float64), "rz"),
    **{f"fma.{direction}.f32": fused(direction) for direction in ("rn", "rz", "rm", "rp")},
    **{f"fma.{direction}.f64": wide_fused(direction) for direction in ("rn", "rz", "rm", "rp")},
    "min.NaN.f32": minimum_or_nan,
    "cvt.rzi.u32.f32": whole_part,
    "cvt.rz.f32.f64": lambda x: single(x.view(np.float64), "rz"),
    "cvt.rn.bf16x2.f32": to_pair,
    "cvt.rn.satfinite.bf16x2.f32": lambda upper, lower: to_pair(upper, lower, clamps=True),
    "cvt.rn.satfinite.e4m3x2.f32": to_codes(ml_dtypes.float8_e4m3fn),
    "cvt.rn.satfinite.e5m2x2.f32": to_codes(ml_dtypes.float8_e5m2),
    "add.bf16x2": of_pairs(exact_sum),
    "sub.bf16x2": of_pairs(lambda a, b: exact_sum(a, -b)),
    "mul.bf16x2": of_pairs(np.multiply),
    "fma.rn.bf16x2": of_pairs(lambda a, b, c: exact_sum(a * b, c)),
    "fma.rn.relu.bf16x2": of_pairs(lambda a, b, c: relu(exact_sum(a * b, c))),
    "abs.bf16x2": lambda x: packed(*(np.where(each > 0x7F80, PAIR_NAN, each) for each in halves(x & np.uint32(0x7FFF7FFF)))),
    "min.bf16x2": chosen_halves(False),
    "min.xorsign.abs.bf16x2": chosen_halves(False, by_magnitude=True),
    "min.NaN.xorsign.abs.bf16x2": chosen_halves(False, keeps_nan=True, by_magnitude=True),
    "max.NaN.xorsign.abs.bf16x2": chosen_halves(True, keeps_nan=True, by_magnitude=True),
}
#: What `setp` compares, by the ends of its names.
COMPARISONS: dict[str, Meaning] = {
    "lt": np.less,
    "gt": np.greater,
    "le": np.less_equal,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
