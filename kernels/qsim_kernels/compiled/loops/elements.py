"""Steps of rounding one element on float32's bit patterns, shared by the loops; see `qsim_kernels.reference.rounding`.

`how` are the numbers of `compiled.rounding.Numbers`, in their order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.carrier import SINGLE
from qsim_kernels.compiled.loops.bits import inlined

_MANTISSA, _INFINITY, _NAN = SINGLE.mantissa, SINGLE.infinity, SINGLE.nan
_i32: Any = np.int32


@inlined
def shift_of(magnitude, shift, low):
    """The number of low bits to round away."""
    grown = min(max(_i32(_i32(low + shift) - _i32(magnitude >> _MANTISSA)), shift), _i32(_MANTISSA)) if low else shift
    # The compiler shifts 32 bits instead of 64 if it knows that fewer are shifted.
    return _i32(grown & 31)


@inlined
def with_sign(rounded, pattern, magnitude):
    """The sign of the element, and the canonical NaN for a NaN."""
    return _i32(_NAN) if magnitude > _INFINITY else _i32(rounded | _i32(pattern & ~_NAN))


@inlined
def limited(rounded, pattern, magnitude, ends, is_signed, has_negative_zero, inward):
    """Replace values beyond the largest, by the largest where the rounding goes `inward`, and give the result its sign."""
    top, bottom, floor, over, under = ends
    # Minus zero is zero, not a number below every value of a set without zero.
    below = pattern < 0 and magnitude > 0
    end = (floor if below else top) if inward else (under if below else over)
    rounded = end if rounded > (bottom if below else top) else rounded
    keeps_sign = is_signed and (has_negative_zero or rounded != 0)
    is_nan = magnitude > _INFINITY or _i32(rounded & _NAN) > _INFINITY
    rounded = _i32(rounded | _i32(pattern & ~_NAN)) if keeps_sign else rounded
    return _i32(_NAN) if is_nan else rounded
