"""Rounding to nearest and stochastic rounding in loops compiled by Numba: one pass over memory, vectorized.

There is one loop per pair of dtypes; formats are runtime numbers, so a sweep over formats compiles nothing new. Compiled code is cached on
disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from qsim_kernels.carrier import SINGLE
from qsim_kernels.compiled.bits import as_float, as_int, held_as, pointer
from qsim_kernels.compiled.elements import load, pattern_of, signed, store, write
from qsim_kernels.compiled.noise import SERVED, draw, draw_first
from qsim_kernels.compiled.stochastic import BY_ADDITION, IN_GENERAL, by_addition, by_steps, in_general

#: Blocks of random bits that are drawn at once, so that their computation is vectorized.
_BLOCKS = 64
_MANTISSA, _INFINITY, _NAN = SINGLE.mantissa, SINGLE.infinity, SINGLE.nan
_i32: Any = np.int32


@lru_cache(maxsize=4)
def nearest_loop(out_dtype: torch.dtype, x_dtype: torch.dtype) -> Callable[..., None]:
    """The loop that rounds to nearest by adding and subtracting a power of two, where `reference.rounding` does so.

    Args:
        out_dtype: The dtype of the results, float32 or bfloat16.
        x_dtype: The dtype of the values.
    """
    out_type, x_type = held_as(out_dtype), held_as(x_dtype)

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, x_at, count, shift, low, top):
        x, out = numba.carray(pointer(x_at), count, x_type), numba.carray(pointer(out_at), count, out_type)
        lowest, steps, top = _i32(low << _MANTISSA), _i32(shift << _MANTISSA), _i32(top)
        for i in range(count):
            pattern = pattern_of(x, i)
            magnitude = _i32(pattern & _NAN)
            within = min(magnitude, top)
            power = as_float(_i32(max(_i32(within & _INFINITY), lowest) + steps))
            store(out, i, signed(as_int(np.float32(np.float32(as_float(within) + power) - power)), pattern, magnitude))

    return loop  # type: ignore[no-any-return]


@lru_cache(maxsize=4)
def stochastic_loop(out_dtype: torch.dtype, x_dtype: torch.dtype) -> Callable[..., None]:
    """The loop that rounds stochastically; takes the arguments of `nearest_loop`.

    The first 16 random bits of an element nearly always decide. Where they might not, all elements of its batch are rounded again with all
    their bits.
    """
    out_type, x_type = held_as(out_dtype), held_as(x_dtype)

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, x_at, count, way, numbers, flags, bits, seed, stream, first):
        x, out = numba.carray(pointer(x_at), count, x_type), numba.carray(pointer(out_at), count, out_type)
        words, noise = np.empty(SERVED // 2 * _BLOCKS, np.uint32), np.empty(SERVED * _BLOCKS, np.uint64)
        halves, given, results = words.view(np.uint16), np.empty(SERVED * _BLOCKS, np.int32), np.empty(SERVED * _BLOCKS, np.int32)
        for start in range(-(first % SERVED), count, SERVED * _BLOCKS):
            begin, end = max(start, 0), min(start + SERVED * _BLOCKS, count)
            # Slices, because the compiler then knows that no index is negative and vectorizes the loops.
            source, to, own = x[begin:end], out[begin:end], slice(begin - start, end - start)
            block = np.uint64((first + start) // SERVED)
            if way != IN_GENERAL:
                draw_first(words, _BLOCKS, block, np.uint64(seed), np.uint64(stream))
                if way == BY_ADDITION:
                    by_addition(to, source, halves[own], numbers, bits)
                    continue
                if by_steps(to, source, halves[own], numbers, bits):
                    continue
            draw(noise, _BLOCKS, block, np.uint64(seed), np.uint64(stream), bits, flags[4])
            load(given, source)
            in_general(results[: end - begin], given, noise[own], numbers, flags)
            write(to, results)

    return loop  # type: ignore[no-any-return]
