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
from qsim_kernels.compiled.elements import limited, pattern_of, shift_of, store
from qsim_kernels.grid import Mode

_INFINITY, _NAN = SINGLE.infinity, SINGLE.nan
_NEAREST, _AWAY, _UPWARD = int(Mode.NEAREST), int(Mode.NEAREST_AWAY), int(Mode.NEAREST_UP)
_ZERO, _UP, _DOWN = int(Mode.TOWARD_ZERO), int(Mode.UP), int(Mode.DOWN)
_i32: Any = np.int32


@lru_cache(maxsize=8)
def deterministic_loop(out_dtype: torch.dtype, x_dtype: torch.dtype, is_nearest: bool) -> Callable[..., None]:
    """The loop for rounding to nearest, ties to even, or for all other modes but the stochastic one; see `loops.nearest_loop`."""
    out_type, x_type = held_as(out_dtype), held_as(x_dtype)

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, x_at, count, mode, numbers, flags, half, parity):
        mode = _NEAREST if is_nearest else mode  # known to the compiler, the mode costs nothing
        x, out = numba.carray(pointer(x_at), count, x_type), numba.carray(pointer(out_at), count, out_type)
        shift0, low, least, half, parity = _i32(numbers[0]), _i32(numbers[1]), _i32(numbers[2]), _i32(half), _i32(parity)
        for i in range(count):
            pattern = pattern_of(x, i)
            magnitude, negative = _i32(pattern & _NAN), pattern < 0
            # A NaN is treated as infinity until the end, so that nothing overflows.
            within = min(magnitude, _i32(_INFINITY))
            shift = shift_of(within, shift0, low)
            ones = ~_i32(_i32(-1) << shift)
            even = _i32(_i32(_i32(within ^ parity) >> shift) & (_i32(1) if shift0 else _i32(ones & 1)))
            rounded = _i32(_i32(within + _increment(mode, ones, even, negative)) & ~ones)
            if least and flags[2]:
                leaves = _leaves_zero(mode, within, half, negative)
                rounded = rounded if within >= least else least if leaves else _i32(0)
            elif least:
                rounded = max(rounded, least)
            stays = mode == _ZERO or (mode == _UP and negative) or (mode == _DOWN and not negative)
            store(out, i, limited(rounded, pattern, magnitude, numbers, flags, flags[3] or (stays and magnitude < _INFINITY)))

    return loop  # type: ignore[no-any-return]


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
