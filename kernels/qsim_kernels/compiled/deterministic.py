"""Rounding without random bits onto any grid in float32's bits, in loops compiled by Numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from qsim_kernels.carrier import SINGLE
from qsim_kernels.compiled.bits import held_as, pointer
from qsim_kernels.compiled.elements import limited, load, shift_of, write
from qsim_kernels.grid import Mode

_INFINITY, _NAN = SINGLE.infinity, SINGLE.nan
_NEAREST, _AWAY, _UPWARD = int(Mode.NEAREST), int(Mode.NEAREST_AWAY), int(Mode.NEAREST_UP)
_ZERO, _UP, _DOWN = int(Mode.TOWARD_ZERO), int(Mode.UP), int(Mode.DOWN)
#: Elements whose patterns are rounded at once, as int32: these loops are compiled once, not for every pair of dtypes.
_AT_ONCE = 1 << 10
_i32: Any = np.int32


@lru_cache(maxsize=4)
def deterministic_loop(out_dtype: torch.dtype, x_dtype: torch.dtype) -> Callable[..., None]:
    """The loop for every mode but the stochastic one; see `loops.nearest_loop`."""
    out_type, x_type = held_as(out_dtype), held_as(x_dtype)

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, x_at, count, mode, numbers, flags, half, parity):
        x, out = numba.carray(pointer(x_at), count, x_type), numba.carray(pointer(out_at), count, out_type)
        given, results = np.empty(_AT_ONCE, np.int32), np.empty(_AT_ONCE, np.int32)
        for start in range(0, count, _AT_ONCE):
            end = min(start + _AT_ONCE, count)
            load(given, x[start:end])
            if mode == _NEAREST:
                _to_nearest(results[: end - start], given, numbers, flags, half, parity)
            else:
                _in_mode(results[: end - start], given, mode, numbers, flags, half, parity)
            write(out[start:end], results)

    return loop  # type: ignore[no-any-return]


# Known to the compiler, the most frequent mode costs nothing.
@numba.njit(nogil=True, cache=True)
def _to_nearest(out, x, numbers, flags, half, parity):
    for i in range(len(out)):
        out[i] = _rounded(x[i], _NEAREST, numbers, flags, _i32(half), _i32(parity))


@numba.njit(nogil=True, cache=True)
def _in_mode(out, x, mode, numbers, flags, half, parity):
    for i in range(len(out)):
        out[i] = _rounded(x[i], mode, numbers, flags, _i32(half), _i32(parity))


@numba.njit(inline="always")
def _rounded(pattern, mode, numbers, flags, half, parity):
    """The rounded pattern of an element; see `elements` for the numbers."""
    shift0, low, least = _i32(numbers[0]), _i32(numbers[1]), _i32(numbers[2])
    magnitude, negative = _i32(pattern & _NAN), pattern < 0
    # A NaN is treated as infinity until the end, so that nothing overflows.
    within = min(magnitude, _i32(_INFINITY))
    shift = shift_of(within, shift0, low)
    ones = ~_i32(_i32(-1) << shift)
    last = _i32(_i32(_i32(within ^ parity) >> shift) & (_i32(1) if shift0 else _i32(ones & 1)))
    rounded = _i32(_i32(within + _increment(mode, ones, last, negative)) & ~ones)
    if least and flags[2]:
        leaves = _leaves_zero(mode, within, half, negative)
        rounded = rounded if within >= least else least if leaves else _i32(0)
    elif least:
        rounded = max(rounded, least)
    stays = mode == _ZERO or (mode == _UP and negative) or (mode == _DOWN and not negative)
    return limited(rounded, pattern, magnitude, numbers, flags, flags[3] or (stays and magnitude < _INFINITY))


@numba.njit(inline="always")
def _increment(mode, ones, last, negative):
    """The number to add so that clearing the low bits leaves the neighbour that the mode chooses; see `reference.rounding`."""
    if mode == _NEAREST:
        return _i32(last + _i32(ones >> 1))
    if mode == _AWAY:
        return _i32(_i32(ones + 1) >> 1)
    if mode == _UPWARD:
        return _i32(_i32(ones + 1 - negative) >> 1)
    if mode == _ZERO:
        return _i32(0)
    if mode == _UP:
        return _i32(0) if negative else ones
    if mode == _DOWN:
        return ones if negative else _i32(0)
    return _i32(0) if last else ones


@numba.njit(inline="always")
def _leaves_zero(mode, magnitude, half, negative):
    """Whether a magnitude below the smallest value rounds to it instead of zero."""
    if mode == _NEAREST:
        return magnitude > half
    if mode == _AWAY:
        return magnitude >= half
    if mode == _UPWARD:
        return magnitude >= half + negative
    if mode == _ZERO or magnitude == 0:
        return False
    if mode == _UP:
        return not negative
    return negative if mode == _DOWN else True
