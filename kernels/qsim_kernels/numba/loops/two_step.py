"""Products of matrices whose sums have two steps; see `TwoStepSum` in `qsim_kernels.numbers.sums`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qsim_kernels.numba.loops.bits import as_long, doubles, longs, numbers, part, shorts
from qsim_kernels.numba.loops.sums import power
from qsim_kernels.numbers.carrier import DOUBLE

_MANTISSA, _BIAS, _INFINITY, _NAN = DOUBLE.mantissa, DOUBLE.bias, DOUBLE.infinity, DOUBLE.nan
#: The exponent of a sum of no products, the smallest of a running sum, and one above all of them that represents infinity's.
_LEAST_PRODUCT, _LEAST_RUNNING, _ABOVE = -300, -126, 512
#: From here on products are infinite.
_BEYOND = 2.0**128
_i64: Any = np.int64
_f32: Any = np.float32


class Steps(NamedTuple):
    """The numbers of a `TwoStepSum`."""

    block: int
    fraction: int
    second: int
    apart: bool


@part
def _rounded_down(x, exponent):
    """A number rounded down to a multiple of a power of two."""
    return np.floor(x * power(-exponent)) * power(exponent)


@part
def _largest(exponents_a, exponents_b, first, stop):
    """The largest exponent of every other product."""
    found = _i64(_LEAST_PRODUCT)
    for k in range(first, stop, 2):
        found = max(found, _i64(exponents_a[k]) + _i64(exponents_b[k]))
    return found


@part
def _truncated_sum(a, b, first, stop, exponent):
    """The exact sum of every other product, each truncated to a multiple of a power of two."""
    up, units = power(-exponent), 0.0
    for k in range(first, stop, 2):
        product = a[k] * b[k]
        units += np.trunc((product * np.inf if abs(product) >= _BEYOND else product) * up)
    return units * power(exponent)


@part
def _two_step(a, b, exponents_a, exponents_b, length, how):
    """One sum."""
    total = 0.0
    for start in range(0, length, how.block):
        stop = min(start + how.block, length)
        even, odd = _largest(exponents_a, exponents_b, start, stop), _largest(exponents_a, exponents_b, start + 1, stop)
        top = max(even, odd)
        if not how.apart:
            even, odd = top, top
        first = _truncated_sum(a, b, start, stop, even - how.fraction)
        second = _truncated_sum(a, b, start + 1, stop, odd - how.fraction)
        products = _rounded_down(first, top - how.fraction) + _rounded_down(second, top - how.fraction)
        running = min(max((as_long(total) >> _MANTISSA & 0x7FF) - _BIAS, _LEAST_RUNNING), _ABOVE)
        top = max(top, running)
        kept = _rounded_down(total, top - how.fraction)
        if how.apart and running < top - how.fraction - 1 and as_long(total) & _NAN < _INFINITY:
            kept = 0.0
        # The sum of two zeros of either sign is +0.
        total = np.float64(_f32(_rounded_down(products, top - how.second) + kept + 0.0))
    return total


def two_step(job_at, first, count):
    """Write some rows of a product.

    Args:
        job_at: Address of a `compiled.jobs.ProductJob`, whose right matrices are transposed, with the address of `Steps` as its unit.
        first: The first row.
        count: The number of rows.
    """
    out_at, a, b, exponents_a, exponents_b, rows, columns, length, _, how_at = numbers(job_at, 10)
    out, n = doubles(out_at), longs(how_at)
    how = Steps(n[0], n[1], n[2], n[3] != 0)
    for row in range(first, first + count):
        for column in range(columns):
            x, y = row * length, (row // rows * columns + column) * length
            left, right, of_left, of_right = (
                doubles(a + 8 * x),
                doubles(b + 8 * y),
                shorts(exponents_a + 2 * x),
                shorts(exponents_b + 2 * y),
            )
            out[row * columns + column] = _two_step(left, right, of_left, of_right, length, how)
