"""Stochastic rounding of a few hundred elements with their random bits, in loops compiled by Numba.

There are three ways. In general, an element goes through the steps of `qsim_kernels.reference.rounding` with all its random bits. Most
formats are symmetric and saturate, and the first 16 bits decide: they are added to a pattern where at most 16 bits are rounded away, and
to an element's distance from zero in steps of 2**-16 of the spacing around it where the values are evenly spaced down to zero.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from qsim_kernels.carrier import NOISE_BITS, SINGLE, Plan
from qsim_kernels.compiled.bits import as_float, as_int
from qsim_kernels.compiled.elements import limited, pattern_of, shift_of, signed, store
from qsim_kernels.grid import Rule

IN_GENERAL, BY_ADDITION, BY_STEPS = 0, 1, 2

_NOISE, _MANTISSA, _INFINITY, _NAN, _BIAS = NOISE_BITS, SINGLE.mantissa, SINGLE.infinity, SINGLE.nan, SINGLE.bias
#: Random bits in a half word.
_HALF = 16
_i32: Any = np.int32
_f32: Any = np.float32


def way_of(how: Plan, rule: Rule) -> int:
    """The fastest way to round stochastically onto a grid in float32's bits."""
    is_symmetric = how.signed and how.negative_zero and how.top == how.bottom
    if not (is_symmetric and rule.saturate) or rule.correction:
        return IN_GENERAL
    if not how.least and how.shift <= _HALF:
        return BY_ADDITION
    mantissa = _MANTISSA - how.shift
    is_even = how.zero and how.low > mantissa and how.least == how.low - mantissa << _MANTISSA
    # Positions must fit an int32, and what they are computed with a float32.
    return BY_STEPS if is_even and mantissa + _HALF < 30 and how.low > mantissa + _HALF else IN_GENERAL


@numba.njit(nogil=True, cache=True)
def by_addition(out, x, halves, numbers, bits):
    """Round where at most 16 bits of every pattern are rounded away; see `in_general` for the arguments."""
    shift, top, mask = _i32(numbers[0]), _i32(numbers[3]), _used(bits)
    kept, spare = _i32(_i32(-1) << shift), _i32(_HALF - shift)
    for i in range(len(x)):
        pattern = pattern_of(x, i)
        magnitude = _i32(pattern & _NAN)
        drawn = _i32(_i32(halves[i]) & mask)
        rounded = _i32(_i32(min(magnitude, top) + _i32(drawn >> spare)) & kept)
        store(out, i, signed(rounded, pattern, magnitude))


@numba.njit(nogil=True, cache=True)
def by_steps(out, x, halves, numbers, bits):
    """Round where the values are evenly spaced down to zero; see `in_general` for the arguments.

    Returns:
        Whether the first 16 random bits decided every element.
    """
    mantissa, lowest, top, mask = _MANTISSA - numbers[0], _i32(numbers[1] << _MANTISSA), _i32(numbers[3]), _used(bits)
    down, up = _i32(mantissa << _MANTISSA), _i32(2 * _BIAS + _HALF + mantissa << _MANTISSA)
    open_ = _i32(0)
    for i in range(len(x)):
        pattern = pattern_of(x, i)
        magnitude = _i32(pattern & _NAN)
        within = min(magnitude, top)
        binade = max(_i32(within & _INFINITY), lowest)
        position = _i32(_f32(as_float(within) * as_float(_i32(up - binade))))
        position = _i32(position + _i32(_i32(halves[i]) & mask))
        # Later bits, of the element and of its noise, could carry through 16 ones only.
        open_ = _i32(open_ | _i32(_i32(_i32(position + 1) & 0xFFFF) == 0))
        rounded = as_int(_f32(_f32(_i32(position >> _HALF)) * as_float(_i32(binade - down))))
        store(out, i, signed(rounded, pattern, magnitude))
    return open_ == 0


@numba.njit(nogil=True, cache=True)
def in_general(out, x, noise, numbers, flags):
    """Round onto any grid in float32's bits.

    Args:
        out: The results, as patterns of float32; in the other functions of float32 or of bfloat16.
        x: The values, likewise.
        noise: The output of `noise.draw`.
        numbers: `shift`, `low`, `least`, `top`, `bottom`, `floor`, `over` and `under` of a `Plan`.
        flags: `signed`, `negative_zero` and `zero` of a `Plan`, `saturate` and `correction` of a `Rule`.
    """
    shift0, low, least = _i32(numbers[0]), _i32(numbers[1]), _i32(numbers[2])
    zero, saturate = flags[2], flags[3]
    for i in range(len(out)):
        pattern, drawn = x[i], noise[i]
        magnitude = _i32(pattern & _NAN)
        # A NaN is treated as infinity until the end, so that nothing overflows.
        within = min(magnitude, _i32(_INFINITY))
        shift = shift_of(within, shift0, low)
        added = _i32(np.uint32(drawn >> np.uint64(_NOISE - _MANTISSA)) >> np.uint32(_MANTISSA - shift))
        rounded = _i32(_i32(within + added) & _i32(_i32(-1) << shift))
        if least and zero:
            leaves = magnitude > 0 and _leaves_zero(within, least, drawn)
            rounded = rounded if within >= least else least if leaves else _i32(0)
        elif least:
            rounded = max(rounded, least)
        out[i] = limited(rounded, pattern, magnitude, numbers, flags, saturate)


@numba.njit(inline="always")
def _leaves_zero(within, least, drawn):
    """Whether a magnitude below the smallest value rounds to it, given its position between zero and it in units of 2**-_NOISE."""
    field, hidden = np.int64(within >> _MANTISSA), np.int64(1 << _MANTISSA)
    significand = np.int64(within) & (hidden - 1) | (hidden if field > 0 else np.int64(0))
    binades = max(np.int64(least >> _MANTISSA) - max(field, np.int64(1)), np.int64(0))
    position = significand << (_NOISE - _MANTISSA) >> min(binades, np.int64(63))
    return np.uint64(position) + drawn >= np.uint64(1 << _NOISE)


@numba.njit(inline="always")
def _used(bits):
    """The mask of the random bits in a half word that are used."""
    return _i32(_i32(0xFFFF) << max(_i32(_HALF) - _i32(bits), _i32(0)) & 0xFFFF)
