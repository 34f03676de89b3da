"""Products of matrices whose groups of products are added exactly; see `BlockScaledSum` in `qsim_kernels.numbers.sums`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qsim_kernels.numba.loops.bits import doubles, numbers, part, room_for_doubles, shorts
from qsim_kernels.numba.loops.sums import aligned_parameters, exponent_of_sum, limited, power
from qsim_kernels.numbers.sums import MOST_BLOCK

#: The exponent of a sum that is zero, below those of all others.
_NONE = -4096
_i64: Any = np.int64


class GroupAddresses(NamedTuple):
    """Addresses of a row of the left matrix and of a column of the right one, of their groups' scales, and of the scales' exponents."""

    a: int
    b: int
    scales_a: int
    scales_b: int
    exponents_a: int
    exponents_b: int


@part
def _dot(a, b, first, stop):
    """The exact sum of some products, in any order."""
    even, odd = 0.0, 0.0
    for k in range(first, stop - 1, 2):
        even += a[k] * b[k]
        odd += a[k + 1] * b[k + 1]
    return even + odd + (a[stop - 1] * b[stop - 1] if (stop - first) & 1 else 0.0)


@part
def _exact_groups(at, length, group, unit):
    """One sum."""
    a, b, scales_a, scales_b = doubles(at.a), doubles(at.b), doubles(at.scales_a), doubles(at.scales_b)
    exponents_a, exponents_b = shorts(at.exponents_a), shorts(at.exponents_b)
    terms, total = room_for_doubles(MOST_BLOCK), 0.0
    for start in range(0, length, unit.block):
        stop, count = min(start + unit.block, length), _i64(0)
        largest = exponent_of_sum(total, unit)
        for first in range(start, stop, group):
            found, i = _dot(a, b, first, min(first + group, stop)), first // group
            terms[count] = found * (scales_a[i] * scales_b[i])
            exponent = _i64(exponents_a[i]) + _i64(exponents_b[i])
            largest = max(largest, exponent if found != 0 else _i64(_NONE))
            count += 1
        up = power(unit.fraction - largest)
        units = np.trunc(total * up)
        for i in range(count):
            units += np.trunc(terms[i] * up)
        total = limited(units * power(largest - unit.fraction), unit)
    return total + 0.0  # never -0


def exact_groups(job_at, first, count):
    """Write some rows of a product.

    Args:
        job_at: Address of a `compiled.jobs.GroupsJob`, whose right matrices are transposed.
        first: The first row.
        count: The number of rows.
    """
    out_at, a, b, scales_a, scales_b, exponents_a, exponents_b, rows, columns, length, group, unit_at = numbers(job_at, 12)
    out, unit, groups = doubles(out_at), aligned_parameters(unit_at), -(-length // group)
    for row in range(first, first + count):
        for column in range(columns):
            other = row // rows * columns + column
            x, y, own, its = row * length, other * length, row * groups, other * groups
            at = GroupAddresses(a + 8 * x, b + 8 * y, scales_a + 8 * own, scales_b + 8 * its, exponents_a + 2 * own, exponents_b + 2 * its)
            out[row * columns + column] = _exact_groups(at, length, group, unit)
