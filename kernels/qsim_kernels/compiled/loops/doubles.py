"""Rounding of rows of float64 numbers in place, with a loop for each mode; see `qsim_kernels.reference.rounding.round_bits`.

Every loop takes the same arguments:
    x_at: Address of the numbers.
    raw_at: Address of 32 random bits for each, as 64-bit integers; only `stochastic` reads them.
    count: Number of elements.
    how_at: Address of the numbers of `Onto`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from qsim_kernels.carrier import DOUBLE, NOISE_BITS
from qsim_kernels.compiled.loops.bits import as_double, as_long, doubles, longs, part, wide_words
from qsim_kernels.grid import Mode

_MANTISSA, _INFINITY, _NAN, _NOISE = DOUBLE.mantissa, DOUBLE.infinity, DOUBLE.nan, NOISE_BITS
_i64: Any = np.int64
_u64: Any = np.uint64
# As int64, because Numba compiles what takes them for each value of a Python int.
NEAREST, NEAREST_AWAY, NEAREST_UP, TOWARD_ZERO, UP, DOWN, ODD, STOCHASTIC = map(_i64, Mode)


class Onto(NamedTuple):
    """A rounding of float64 numbers: the numbers of a `carrier.GridBits` and of a `Rule`."""

    shift: int
    low: int
    least: int
    half: int
    parity: int
    top: int
    bottom: int
    floor: int
    over: int
    under: int
    scale: float
    signed: bool
    negative_zero: bool
    zero: bool
    bits: int
    correction: bool
    saturate: bool


@part
def onto_at(how_at):
    """Read an `Onto` from memory: 64-bit integers, and the bits of a float64."""
    n = longs(how_at)
    flags = n[11] != 0, n[12] != 0, n[13] != 0
    return Onto(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], as_double(n[10]), *flags, n[14], n[15] != 0, n[16] != 0)


# LLVM inlines it, not Numba, which would analyze a copy for each mode.
@numba.njit(_nrt=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)
def onto(x, raw, how, mode):
    """Round a number onto a grid. Nothing returns early, so that loops over this are vectorized.

    Args:
        x: A float64 number.
        raw: 32 random bits.
        how: An `Onto`.
        mode: The mode, as a constant.
    """
    bits = as_long(x)
    magnitude = bits & _NAN
    negative, inexact, is_nan = bits < 0, magnitude > 0, magnitude > _INFINITY
    shift = min(max(how.low + how.shift - (magnitude >> _MANTISSA), how.shift), _MANTISSA) if how.low else how.shift
    ones = (_i64(1) << shift) - 1
    if mode == NEAREST:
        last = ((magnitude ^ how.parity) >> shift) & (_i64(1) if how.shift else ones & 1)
        added, leaves = last + (ones >> 1), magnitude > how.half
    elif mode == NEAREST_AWAY:
        added, leaves = (ones + 1) >> 1, inexact & (magnitude >= how.half)
    elif mode == NEAREST_UP:
        added = (ones + 1 - _i64(negative)) >> 1
        leaves = inexact & (magnitude >= how.half + _i64(negative))
    elif mode == TOWARD_ZERO:
        added, leaves = _i64(0), False
    elif mode == UP:
        added, leaves = _i64(0) if negative else ones, inexact & (bits >= 0)
    elif mode == DOWN:
        added, leaves = ones if negative else _i64(0), inexact & negative
    elif mode == ODD:
        added, leaves = ((((magnitude ^ how.parity) >> shift) & 1) ^ 1) * ones, inexact
    else:
        noise = _i64(raw >> _u64(32 - how.bits) << _u64(_NOISE - how.bits))
        noise |= _i64(1) << (_NOISE - 1 - how.bits) if how.correction else _i64(0)
        added = noise << (_MANTISSA - _NOISE) >> (_MANTISSA - shift)
        leaves = _i64(as_double(min(magnitude, how.least)) * how.scale) + noise >= _i64(1) << _NOISE
    rounded = (magnitude + added) & ~ones
    gradual = (how.least if leaves else _i64(0)) if how.zero else how.least
    rounded = gradual if magnitude < how.least else rounded
    below = negative & inexact
    inward = mode == TOWARD_ZERO or (mode == UP and below) or (mode == DOWN and not below)
    stops = how.saturate | (inward & (magnitude < _INFINITY))
    end = (how.floor if below else how.top) if stops else (how.under if below else how.over)
    rounded = end if rounded > (how.bottom if below else how.top) else rounded
    keeps_sign = how.signed & (how.negative_zero | (rounded != 0))
    is_nan = is_nan | (rounded > _INFINITY)
    rounded = rounded | (bits & ~_i64(_NAN)) if keeps_sign else rounded
    return as_double(_i64(_NAN) if is_nan else rounded)


def _without_random_bits(mode):
    def round_row(x_at, raw_at, count, how_at):
        x, how = doubles(x_at), onto_at(how_at)
        for i in range(count):
            x[i] = onto(x[i], _u64(0), how, mode)

    return round_row


nearest = _without_random_bits(NEAREST)
nearest_away = _without_random_bits(NEAREST_AWAY)
nearest_up = _without_random_bits(NEAREST_UP)
toward_zero = _without_random_bits(TOWARD_ZERO)
up = _without_random_bits(UP)
down = _without_random_bits(DOWN)
odd = _without_random_bits(ODD)


def stochastic(x_at, raw_at, count, how_at):
    """Round stochastically."""
    x, raw, how = doubles(x_at), wide_words(raw_at), onto_at(how_at)
    for i in range(count):
        x[i] = onto(x[i], raw[i], how, STOCHASTIC)
