"""Products of matrices with emulated accumulators: some elements of a row of the result at a time.

They go through the steps of `qsim_kernels.torch.sums`, in float64. Formats, roundings and sizes are runtime numbers; both loops take
some rows of the result and the address of a `compiled.jobs.ProductJob`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qsim_kernels.numba.loops.bits import as_double, as_long, call, doubles, longs, numbers, part, room_for_longs, shorts, words
from qsim_kernels.numba.loops.noise import SERVED, draw
from qsim_kernels.numba.loops.roundings import double_at, of_sums
from qsim_kernels.numbers.carrier import DOUBLE, GridNumbers
from qsim_kernels.numbers.grid import Mode
from qsim_kernels.numbers.sums import LEAST_EXPONENT, Order

#: The most elements of a row that are computed together, and their rows of numbers that `rounded` needs room for.
WIDTH = 128
#: Sums of a tree that wait for one of as many terms: one for each bit of the number of terms.
WAITING = 64
#: Where rows of numbers begin in the room of `rounded`: terms, results, four of a step, random bits; then sums that wait; then the noise.
_ROW = 8 * WIDTH
_TERM, _TOTAL, _DUE, _AFTER, _GAINED, _LOST, _RAW, _WAITING, _NOISE_AT = (*range(0, 8 * _ROW, _ROW), (7 + WAITING) * _ROW)
_MANTISSA, _BIAS, _INFINITY, _NAN = DOUBLE.mantissa, DOUBLE.bias, DOUBLE.infinity, DOUBLE.nan
_nearest, _toward_zero = of_sums(Mode.NEAREST), of_sums(Mode.TOWARD_ZERO)
_PAIRWISE, _KAHAN = int(Order.PAIRWISE), int(Order.KAHAN)
_i64: Any = np.int64
_u64: Any = np.uint64
_f32: Any = np.float32


class AlignedParameters(NamedTuple):
    """A matrix unit: an `AlignedSum`."""

    grid: GridNumbers
    is_nearest: bool
    end: float
    low: int
    block: int
    fraction: int


class RoundedParameters(NamedTuple):
    """A `RoundedSum`: addresses of the loops that round sums and products and of their numbers, 0 for products that are not rounded.

    `stride` is the number of an element's random bits, 0 if nothing is drawn; with `chunk=1` any unit will do.
    """

    loop: int
    how: int
    product_loop: int
    product_how: int
    chunk: int
    order: int
    roundings: int
    stride: int
    unit: AlignedParameters


class RowAddresses(NamedTuple):
    """Addresses of a row of the left matrix and of the right one's part that it is multiplied by, and the distance of its rows."""

    a: int
    b: int
    exponents_a: int
    exponents_b: int
    length: int
    apart: int


@part
def aligned_parameters(at):
    """Read `AlignedParameters` from memory."""
    n = longs(at)
    return AlignedParameters(double_at(at + 40)[0], n[0] != 0, as_double(n[1]), n[2], n[3], n[4])


@part
def _rounded_parameters(at, unit_at, stride):
    """Read `RoundedParameters` from memory."""
    n = longs(at)
    return RoundedParameters(n[0], n[1], n[2], n[3], n[4], n[5], n[6], stride, aligned_parameters(unit_at))


@part
def power(exponent):
    """A power of two."""
    return as_double(_i64(exponent + _BIAS) << _MANTISSA)


@part
def exponent_of_sum(total, unit):
    """The exponent of a running sum; any large one for infinities and NaN."""
    return min(max((as_long(total) >> _MANTISSA & 0x7FF) - _BIAS, unit.low), 512) if total != 0 else _i64(LEAST_EXPONENT)


@part
def limited(exact, unit):
    """The exact sum of a block, rounded to a running sum."""
    if abs(exact) >= unit.end:
        return exact * np.inf
    bits = as_long(exact)
    return as_double(_nearest(bits, _u64(0), unit.grid, 0) if unit.is_nearest else _toward_zero(bits, _u64(0), unit.grid, 0))


@part
def _aligned(a_at, b_at, exponents_a_at, exponents_b_at, length, unit):
    """A sum of aligned and truncated products."""
    a, b, exponents_a, exponents_b = doubles(a_at), doubles(b_at), shorts(exponents_a_at), shorts(exponents_b_at)
    total = 0.0
    for start in range(0, length, unit.block):
        stop = min(start + unit.block, length)
        largest = exponent_of_sum(total, unit)
        for k in range(start, stop):
            largest = max(largest, _i64(exponents_a[k]) + _i64(exponents_b[k]))
        up = power(unit.fraction - largest)
        units = np.trunc(total * up)
        for k in range(start, stop):
            units += np.trunc(a[k] * b[k] * up)
        total = limited(units * power(largest - unit.fraction), unit)
    return total + 0.0  # never -0


def aligned(job_at, first, count):
    """Write some rows of a product whose sums are `AlignedSum`s, or promoted every so many products.

    Args:
        job_at: Address of a `ProductJob`, whose right matrices are transposed.
        first: The first row.
        count: The number of rows.
    """
    out_at, a, b, exponents_a, exponents_b, rows, columns, length, every, unit_at = numbers(job_at, 10)
    out, unit, step = doubles(out_at), aligned_parameters(unit_at), every if every else length
    for row in range(first, first + count):
        for column in range(columns):
            own, other, total = row * length, (row // rows * columns + column) * length, 0.0
            for k in range(0, length, step):
                x, y = own + k, other + k
                found = _aligned(a + 8 * x, b + 8 * y, exponents_a + 2 * x, exponents_b + 2 * y, min(step, length - k), unit)
                total = np.float64(_f32(_f32(total) + _f32(found))) if every else found
            out[row * columns + column] = total


@part
def _add(into_at, x_at, y_at, factor, count):
    """Write the sums of numbers and of others times 1 or -1, rounded to odd."""
    into, x, y = doubles(into_at), doubles(x_at), doubles(y_at)
    for i in range(count):
        first, second = x[i], y[i] * factor
        near = first + second
        from_second = near - first
        rest = (first - (near - from_second)) + (second - from_second)
        bits = as_long(near)
        missing = (rest != 0) & ((bits & _NAN) < _INFINITY)
        is_odd = bits - _i64((as_long(rest) ^ bits) < 0) | 1
        into[i] = as_double(is_odd if missing else bits)


@part
def _round(x_at, room, index, count, how):
    """Round sums of some elements, the first of which owns the random bits at an index."""
    _take(room, index, count, how)
    call(how.loop, (x_at, room + _RAW, count, how.how))


@part
def _take(room, index, count, how):
    """Copy the random bits of one rounding of some elements."""
    raw, noise = words(room + _RAW), words(room + _NOISE_AT)
    if how.stride:
        for i in range(count):
            raw[i] = noise[index + i * how.stride]


@part
def _terms(room, j, given, count, how):
    """Write the terms number `j` of some elements, before a product's rounding."""
    into, start = doubles(room + _TERM), j * how.chunk
    if how.chunk == 1:
        left, right = doubles(given.a)[j], doubles(given.b + 8 * j * given.apart)
        for i in range(count):
            into[i] = left * right[i]
        return
    size = min(how.chunk, given.length - start)
    for i in range(count):
        at = i * given.apart + start
        into[i] = _aligned(given.a + 8 * start, given.b + 8 * at, given.exponents_a + 2 * start, given.exponents_b + 2 * at, size, how.unit)


@part
def _rounded(room, given, at, count, how):
    """Write sums that are rounded after each term as the totals; `at` is the place of the first element's random bits."""
    number, each = -(-given.length // how.chunk), how.roundings
    total, after, lost = doubles(room + _TOTAL), doubles(room + _AFTER), doubles(room + _LOST)
    sizes, firsts, depth = room_for_longs(WAITING), room_for_longs(WAITING), _i64(0)
    for i in range(count):
        total[i], lost[i] = 0.0, 0.0
    for j in range(number):
        _terms(room, j, given, count, how)
        own = at + j * each
        if how.product_loop:
            _take(room, own, count, how)
            call(how.product_loop, (room + _TERM, room + _RAW, count, how.product_how))
            own += 1
        if how.order == _PAIRWISE:
            _round(room + _TERM, room, own, count, how)
            _copy(room + _WAITING + depth * _ROW, room + _TERM, count)
            sizes[depth], firsts[depth] = 1, j
            depth += 1
            while depth > 1 and (sizes[depth - 1] == sizes[depth - 2] or j == number - 1):
                left = room + _WAITING + (depth - 2) * _ROW
                _add(left, left, left + _ROW, 1.0, count)
                _round(left, room, at + firsts[depth - 1] * each - 1, count, how)
                sizes[depth - 2] += sizes[depth - 1]
                depth -= 1
        elif how.order == _KAHAN:
            _add(room + _DUE, room + _TERM, room + _LOST, -1.0, count)
            _round(room + _DUE, room, own, count, how)
            _add(room + _AFTER, room + _TOTAL, room + _DUE, 1.0, count)
            _round(room + _AFTER, room, own + 1, count, how)
            _add(room + _GAINED, room + _AFTER, room + _TOTAL, -1.0, count)
            _round(room + _GAINED, room, own + 2, count, how)
            _add(room + _LOST, room + _GAINED, room + _DUE, -1.0, count)
            _round(room + _LOST, room, own + 3, count, how)
            for i in range(count):
                lost[i] = lost[i] if as_long(after[i]) & _NAN < _INFINITY else 0.0
                total[i] = after[i]
        else:
            _add(room + _TOTAL, room + _TOTAL, room + _TERM, 1.0, count)
            _round(room + _TOTAL, room, own, count, how)
    if how.order == _PAIRWISE and number:
        _copy(room + _TOTAL, room + _WAITING, count)


@part
def _copy(into_at, x_at, count):
    """Copy numbers."""
    into, x = doubles(into_at), doubles(x_at)
    for i in range(count):
        into[i] = x[i]


@part
def _draw(room, index, count, seed, stream):
    """Draw the random bits of so many indices.

    Returns:
        The place of the first.
    """
    draw(words(room + _NOISE_AT), count // SERVED + 1, _u64(index // SERVED), _u64(seed), _u64(stream))
    return index % SERVED


def rounded(job_at, first, count):
    """Write some rows of a product whose sums are `RoundedSum`s, or promoted every so many products.

    Args:
        job_at: Address of a `ProductJob`, whose right matrices are transposed if terms are chunks.
        first: The first row.
        count: The number of rows.
    """
    out_at, a, b, exponents_a, exponents_b, rows, columns, length, every, unit_at = numbers(job_at, 10)
    course_at, seed, stream, offset, stride, inner, width, room, room_size, own_rows = numbers(job_at + 80, 10)
    room += 8 * room_size * (first // own_rows)
    how, total, step = _rounded_parameters(course_at, unit_at, stride), doubles(room + _TOTAL), every if every else length
    is_chunked = how.chunk > 1
    along, apart = (1, length) if is_chunked else (columns, columns)
    for row in range(first, first + count):
        for begin in range(0, columns, width):
            size, at = min(width, columns - begin), _i64(0)
            result = doubles(out_at + 8 * (row * columns + begin))
            if stride:
                at = _draw(room, offset + (row * columns + begin) * stride, stride * size, seed, stream)
            for i in range(size):
                result[i] = 0.0
            x, y = row * length, row // rows * columns * length + begin * (length if is_chunked else 1)
            for k in range(0, length, step):
                z = y + k * along
                given = RowAddresses(
                    a + 8 * (x + k), b + 8 * z, exponents_a + 2 * (x + k), exponents_b + 2 * z, min(step, length - k), apart
                )
                _rounded(room, given, at + k // step * inner, size, how)
                for i in range(size):
                    result[i] = np.float64(_f32(_f32(result[i]) + _f32(total[i]))) if every else total[i]
