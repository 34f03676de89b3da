"""Steps of rounding one element on float32's bit patterns, shared by the loops; see `qsim_kernels.reference.rounding`.

`numbers` are `shift`, `low`, `least`, `top`, `bottom`, `floor`, `over` and `under` of a `Plan`; `flags` its `signed`, `negative_zero` and
`zero`, and `saturate` and `correction` of a `Rule`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from qsim_kernels.carrier import SINGLE

_MANTISSA, _INFINITY, _NAN = SINGLE.mantissa, SINGLE.infinity, SINGLE.nan
_i32: Any = np.int32


@numba.njit(inline="always")
def pattern_of(x, i):
    """The float32 pattern of an element of an array of float32 or bfloat16 patterns."""
    return _i32(_i32(x[i]) << 16) if x.itemsize == 2 else _i32(x[i])


@numba.njit(inline="always")
def store(out, i, pattern):
    """Write a float32 pattern, whose lower half is zero where the output is bfloat16."""
    out[i] = pattern >> 16 if out.itemsize == 2 else pattern


@numba.njit(inline="always")
def load(patterns, x):
    """Read the float32 patterns of an array of float32 or bfloat16 patterns."""
    for i in range(len(x)):
        patterns[i] = pattern_of(x, i)


@numba.njit(inline="always")
def write(out, patterns):
    """Write float32 patterns; see `store`."""
    for i in range(len(out)):
        store(out, i, patterns[i])


@numba.njit(inline="always")
def shift_of(magnitude, shift, low):
    """The number of low bits to round away."""
    return min(max(_i32(_i32(low + shift) - _i32(magnitude >> _MANTISSA)), shift), _i32(_MANTISSA)) if low else shift


@numba.njit(inline="always")
def signed(rounded, pattern, magnitude):
    """The sign of the element, and the canonical NaN for a NaN."""
    return _i32(_NAN) if magnitude > _INFINITY else _i32(rounded | _i32(pattern & ~_NAN))


@numba.njit(inline="always")
def limited(rounded, pattern, magnitude, numbers, flags, inward):
    """Replace values beyond the largest, by the largest where the rounding goes `inward`, and give the result its sign."""
    top, bottom, floor, over, under = _i32(numbers[3]), _i32(numbers[4]), _i32(numbers[5]), _i32(numbers[6]), _i32(numbers[7])
    # Minus zero is zero, not a number below every value of a set without zero.
    below = pattern < 0 and magnitude > 0
    end = (floor if below else top) if inward else (under if below else over)
    rounded = end if rounded > (bottom if below else top) else rounded
    keeps_sign = flags[0] and (flags[1] or rounded != 0)
    is_nan = magnitude > _INFINITY or _i32(rounded & _NAN) > _INFINITY
    rounded = _i32(rounded | _i32(pattern & ~_NAN)) if keeps_sign else rounded
    return _i32(_NAN) if is_nan else rounded
