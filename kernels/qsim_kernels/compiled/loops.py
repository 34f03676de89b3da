"""Rounding onto a grid in loops that Numba compiles: one pass over memory, several elements at a time.

An element goes through the steps of `qsim_kernels.reference.rounding`. A loop is made for one rounding mode, one carrier and one pair of
dtypes; formats are numbers at run time, so a sweep over formats compiles nothing new. What was compiled is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numba
import numpy as np

from qsim_kernels.carrier import NOISE_BITS
from qsim_kernels.compiled.bits import as_float, as_int, pointer
from qsim_kernels.compiled.noise import SERVED, draw
from qsim_kernels.grid import Mode


class Stored(IntEnum):
    """The dtype in whose bits patterns lie in memory."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT64 = 3


_FLOAT32, _BFLOAT16, _FLOAT16, _FLOAT64 = map(int, Stored)
_NEAREST, _NEAREST_AWAY, _NEAREST_UP, _TOWARD_ZERO, _UP, _DOWN, _ODD, _STOCHASTIC = map(int, Mode)
#: Blocks of random bits that are drawn at once, so that they are computed side by side.
_BLOCKS = 64
_NOISE = NOISE_BITS
_i32: Any = np.int32


@lru_cache(maxsize=64)
def adding_loop(out_stored: int, x_stored: int) -> Callable[..., None]:
    """The loop that rounds to nearest by adding a power of two and taking it away, where `reference.rounding` does so."""

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, x_at, count, shift, low, top):
        x16, x32 = numba.carray(pointer(x_at), count, np.int16), numba.carray(pointer(x_at), count, np.int32)
        out16, out32 = numba.carray(pointer(out_at), count, np.int16), numba.carray(pointer(out_at), count, np.int32)
        lowest, steps, top = _i32(low << 23), _i32(shift << 23), _i32(top)
        for i in range(count):
            pattern = _load(x_stored, x16, x32, i)
            magnitude = _i32(pattern & 0x7FFFFFFF)
            within = min(magnitude, top)
            power = as_float(_i32(max(_i32(within & 0x7F800000), lowest) + steps))
            rounded = as_int(np.float32(np.float32(as_float(within) + power) - power))
            rounded = _i32(rounded | _i32(pattern & -0x80000000))
            _store(out_stored, out16, out32, i, _i32(0x7FFFFFFF) if magnitude > 0x7F800000 else rounded)

    return loop  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def rounding_loop(mode: int, long: bool, out_stored: int, x_stored: int) -> Callable[..., None]:
    """The loop of a rounding mode.

    Args:
        mode: A `Mode`.
        long: Whether more than 16 random bits are used.
        out_stored: How results lie in memory, a `Stored`: both `FLOAT64`, or neither.
        x_stored: How values do.
    """
    wide = x_stored == _FLOAT64
    mantissa = 52 if wide else 23
    integer: Any = np.int64 if wide else np.int32
    infinity, nan = (0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF) if wide else (0x7F800000, 0x7FFFFFFF)
    sign = -nan - 1

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, x_at, count, numbers, flags, bits, seed, stream, first):
        x16, x32 = numba.carray(pointer(x_at), count, np.int16), numba.carray(pointer(x_at), count, np.int32)
        out16, out32 = numba.carray(pointer(out_at), count, np.int16), numba.carray(pointer(out_at), count, np.int32)
        x64, out64 = numba.carray(pointer(x_at), count, np.int64), numba.carray(pointer(out_at), count, np.int64)
        shift0, low, least = integer(numbers[0]), integer(numbers[1]), integer(numbers[2])
        half, parity = integer(numbers[3]), integer(numbers[4])
        top, bottom, floor = integer(numbers[5]), integer(numbers[6]), integer(numbers[7])
        over, under = integer(numbers[8]), integer(numbers[9])
        signed, negative_zero, zero, saturate, correction = flags
        noise = np.zeros(SERVED * _BLOCKS, np.uint64)
        skip = first % SERVED if mode == _STOCHASTIC else 0
        for start in range(-skip, count, SERVED * _BLOCKS):
            if mode == _STOCHASTIC:
                draw(noise, _BLOCKS, np.uint64((first + start) // SERVED), np.uint64(seed), np.uint64(stream), bits, long, correction)
            for i in range(max(start, 0), min(start + SERVED * _BLOCKS, count)):
                pattern = x64[i] if wide else _load(x_stored, x16, x32, i)
                magnitude, negative = integer(pattern & nan), pattern < 0
                # A NaN is taken for an infinity until the end, so that nothing overflows.
                within = min(magnitude, integer(infinity))
                shift = min(max(integer(integer(low + shift0) - integer(within >> mantissa)), shift0), integer(mantissa)) if low else shift0
                ones = integer(~integer(integer(-1) << shift))
                drawn = noise[i - start] if mode == _STOCHASTIC else np.uint64(0)
                added = _increment(mode, integer, mantissa, within, negative, shift, ones, parity, drawn)
                rounded = integer(integer(within + added) & integer(~ones))
                if least and zero:
                    leaves = magnitude > 0 and _leaves_zero(mode, mantissa, within, negative, least, half, drawn)
                    rounded = rounded if within >= least else least if leaves else integer(0)
                elif least:
                    rounded = max(rounded, least)
                # Minus zero is zero, not a number below every value of a set without zero.
                below = negative and magnitude > 0
                stays = saturate or (_is_inward(mode, below) and magnitude < infinity)
                end = (floor if below else top) if stays else (under if below else over)
                rounded = end if rounded > (bottom if below else top) else rounded
                is_nan = magnitude > infinity or integer(rounded & nan) > infinity
                keeps_sign = signed and (negative_zero or rounded != 0)
                rounded = integer(rounded | integer(pattern & sign)) if keeps_sign else rounded
                rounded = integer(nan) if is_nan else rounded
                if wide:
                    out64[i] = rounded
                else:
                    _store(out_stored, out16, out32, i, rounded)

    return loop  # type: ignore[no-any-return]


@numba.njit(inline="always")
def _increment(mode, integer, mantissa, within, negative, shift, ones, parity, drawn):
    """What to add so that clearing the low bits, those in `ones`, leaves the neighbour that the rounding chooses."""
    added = integer(0)
    if mode == _NEAREST:
        last = integer(integer(within ^ parity) >> shift)
        added = integer(integer(last & integer(ones & 1)) + integer(ones >> 1))
    elif mode == _NEAREST_AWAY:
        added = integer(integer(ones + 1) >> 1)
    elif mode == _NEAREST_UP:
        added = integer(integer(ones + integer(0 if negative else 1)) >> 1)
    elif mode == _UP:
        added = integer(0) if negative else ones
    elif mode == _DOWN:
        added = ones if negative else integer(0)
    elif mode == _ODD:
        added = integer(0) if integer(within ^ parity) >> shift & 1 else ones
    elif mode == _STOCHASTIC:
        if mantissa > _NOISE:
            added = integer(drawn << np.uint64(mantissa - _NOISE) >> np.uint64(mantissa - shift))
        else:
            added = integer(np.uint32(drawn >> np.uint64(_NOISE - mantissa)) >> np.uint32(mantissa - shift))
    return added


@numba.njit(inline="always")
def _leaves_zero(mode, mantissa, within, negative, least, half, drawn):
    """Whether a magnitude below the smallest value, and not zero, goes to it."""
    leaves = mode == _ODD
    if mode == _NEAREST:
        leaves = within > half
    elif mode == _NEAREST_AWAY:
        leaves = within >= half
    elif mode == _NEAREST_UP:
        leaves = within > half if negative else within >= half
    elif mode == _UP:
        leaves = not negative
    elif mode == _DOWN:
        leaves = negative
    elif mode == _STOCHASTIC:
        # The position between zero and the smallest value, which is a power of two, in units of 2**-_NOISE.
        field, hidden = np.int64(within >> mantissa), np.int64(1) << mantissa
        significand = np.int64(within) & (hidden - 1) | (hidden if field > 0 else np.int64(0))
        binades = max(np.int64(least >> mantissa) - max(field, np.int64(1)), np.int64(0))
        position = significand << max(_NOISE - mantissa, 0) >> min(binades + max(mantissa - _NOISE, 0), np.int64(63))
        leaves = np.uint64(position) + drawn >= np.uint64(1) << np.uint64(_NOISE)
    return leaves


@numba.njit(inline="always")
def _is_inward(mode, below):
    """Whether the rounding never goes past the largest value from a finite one."""
    return mode == _TOWARD_ZERO or (mode == _UP and below) or (mode == _DOWN and not below)


@numba.njit(inline="always")
def _load(stored, x16, x32, i):
    """float32's pattern of an element."""
    if stored == _FLOAT32:
        return x32[i]
    if stored == _BFLOAT16:
        return _i32(_i32(x16[i]) << 16)
    half = _i32(x16[i])
    magnitude = _i32(half & 0x7FFF)
    normal = _i32(_i32(magnitude << 13) + 0x38000000)
    subnormal = as_int(np.float32(np.float32(magnitude) * np.float32(2.0**-24)))
    wide = subnormal if magnitude < 0x400 else normal
    wide = _i32(_i32(magnitude << 13) | 0x7F800000) if magnitude >= 0x7C00 else wide
    return _i32(wide | _i32(_i32(half & -0x8000) << 16))


@numba.njit(inline="always")
def _store(stored, out16, out32, i, pattern):
    """Writes the pattern of a number that the dtype holds."""
    if stored == _FLOAT32:
        out32[i] = pattern
    elif stored == _BFLOAT16:
        out16[i] = np.int16(pattern >> 16)
    else:
        magnitude = _i32(pattern & 0x7FFFFFFF)
        # Numbers below 2**-14 are multiples of 2**-24.
        steps = _i32(np.float32(as_float(min(magnitude, _i32(0x38800000))) * np.float32(2.0**24)))
        half = _i32(_i32(magnitude - 0x38000000) >> 13) if magnitude >= 0x38800000 else steps
        half = _i32(0x7C00) if magnitude == 0x7F800000 else half
        half = _i32(half | _i32(_i32(pattern >> 16) & -0x8000))
        out16[i] = np.int16(0x7FFF) if magnitude > 0x7F800000 else np.int16(half)
