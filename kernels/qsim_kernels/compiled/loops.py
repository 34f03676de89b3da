"""Rounding to nearest and stochastic rounding in loops compiled by Numba: one pass over memory, vectorized.

An element goes through the steps of `qsim_kernels.reference.rounding`, on float32's bit patterns. There is one loop per pair of dtypes;
formats are runtime numbers, so a sweep over formats compiles nothing new. Compiled code is cached on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from qsim_kernels.carrier import NOISE_BITS, SINGLE
from qsim_kernels.compiled.bits import as_float, as_int, pointer
from qsim_kernels.compiled.noise import SERVED, draw

#: Blocks of random bits that are drawn at once, so that their computation is vectorized.
_BLOCKS = 64
_NOISE, _MANTISSA, _INFINITY, _NAN = NOISE_BITS, SINGLE.mantissa, SINGLE.infinity, SINGLE.nan
_i32: Any = np.int32


@lru_cache(maxsize=4)
def nearest_loop(out_dtype: torch.dtype, x_dtype: torch.dtype) -> Callable[..., None]:
    """The loop that rounds to nearest by adding and subtracting a power of two, where `reference.rounding` does so.

    Args:
        out_dtype: The dtype of the results, float32 or bfloat16.
        x_dtype: The dtype of the values.
    """
    is_out_narrow, is_x_narrow = out_dtype == torch.bfloat16, x_dtype == torch.bfloat16

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, x_at, count, shift, low, top):
        x16, x32 = numba.carray(pointer(x_at), count, np.int16), numba.carray(pointer(x_at), count, np.int32)
        out16, out32 = numba.carray(pointer(out_at), count, np.int16), numba.carray(pointer(out_at), count, np.int32)
        lowest, steps, top = _i32(low << _MANTISSA), _i32(shift << _MANTISSA), _i32(top)
        for i in range(count):
            pattern = _i32(_i32(x16[i]) << 16) if is_x_narrow else x32[i]
            magnitude = _i32(pattern & _NAN)
            within = min(magnitude, top)
            power = as_float(_i32(max(_i32(within & _INFINITY), lowest) + steps))
            rounded = as_int(np.float32(np.float32(as_float(within) + power) - power))
            rounded = _i32(rounded | _i32(pattern & ~_NAN))
            rounded = _i32(_NAN) if magnitude > _INFINITY else rounded
            if is_out_narrow:
                out16[i] = np.int16(rounded >> 16)
            else:
                out32[i] = rounded

    return loop  # type: ignore[no-any-return]


@lru_cache(maxsize=4)
def stochastic_loop(out_dtype: torch.dtype, x_dtype: torch.dtype) -> Callable[..., None]:
    """The loop that rounds stochastically; takes the arguments of `nearest_loop`."""
    is_out_narrow, is_x_narrow = out_dtype == torch.bfloat16, x_dtype == torch.bfloat16

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, x_at, count, numbers, flags, bits, seed, stream, first):
        x16, x32 = numba.carray(pointer(x_at), count, np.int16), numba.carray(pointer(x_at), count, np.int32)
        out16, out32 = numba.carray(pointer(out_at), count, np.int16), numba.carray(pointer(out_at), count, np.int32)
        shift0, low, least = _i32(numbers[0]), _i32(numbers[1]), _i32(numbers[2])
        top, bottom, floor, over, under = _i32(numbers[3]), _i32(numbers[4]), _i32(numbers[5]), _i32(numbers[6]), _i32(numbers[7])
        signed, negative_zero, zero, saturate, correction = flags
        noise = np.zeros(SERVED * _BLOCKS, np.uint64)
        for start in range(-(first % SERVED), count, SERVED * _BLOCKS):
            draw(noise, _BLOCKS, np.uint64((first + start) // SERVED), np.uint64(seed), np.uint64(stream), bits, correction)
            # Slices, because the compiler then knows that no index is negative and vectorizes the loop.
            begin, end_of = max(start, 0), min(start + SERVED * _BLOCKS, count)
            own, from16, from32 = noise[begin - start : end_of - start], x16[begin:end_of], x32[begin:end_of]
            to16, to32 = out16[begin:end_of], out32[begin:end_of]
            for i in range(end_of - begin):
                pattern = _i32(_i32(from16[i]) << 16) if is_x_narrow else from32[i]
                magnitude, drawn = _i32(pattern & _NAN), own[i]
                # A NaN is treated as infinity until the end, so that nothing overflows.
                within = min(magnitude, _i32(_INFINITY))
                shift = min(max(_i32(_i32(low + shift0) - _i32(within >> _MANTISSA)), shift0), _i32(_MANTISSA)) if low else shift0
                added = _i32(np.uint32(drawn >> np.uint64(_NOISE - _MANTISSA)) >> np.uint32(_MANTISSA - shift))
                rounded = _i32(_i32(within + added) & _i32(_i32(-1) << shift))
                if least and zero:
                    leaves = magnitude > 0 and _leaves_zero(within, least, drawn)
                    rounded = rounded if within >= least else least if leaves else _i32(0)
                elif least:
                    rounded = max(rounded, least)
                # Minus zero is zero, not a number below every value of a set without zero.
                below = pattern < 0 and magnitude > 0
                end = (floor if below else top) if saturate else (under if below else over)
                rounded = end if rounded > (bottom if below else top) else rounded
                is_nan = magnitude > _INFINITY or _i32(rounded & _NAN) > _INFINITY
                keeps_sign = signed and (negative_zero or rounded != 0)
                rounded = _i32(rounded | _i32(pattern & ~_NAN)) if keeps_sign else rounded
                rounded = _i32(_NAN) if is_nan else rounded
                if is_out_narrow:
                    to16[i] = np.int16(rounded >> 16)
                else:
                    to32[i] = rounded

    return loop  # type: ignore[no-any-return]


@numba.njit(inline="always")
def _leaves_zero(within, least, drawn):
    """Whether a magnitude below the smallest value rounds to it, given its position between zero and it in units of 2**-_NOISE."""
    field, hidden = np.int64(within >> _MANTISSA), np.int64(1 << _MANTISSA)
    significand = np.int64(within) & (hidden - 1) | (hidden if field > 0 else np.int64(0))
    binades = max(np.int64(least >> _MANTISSA) - max(field, np.int64(1)), np.int64(0))
    position = significand << (_NOISE - _MANTISSA) >> min(binades, np.int64(63))
    return np.uint64(position) + drawn >= np.uint64(1 << _NOISE)
