"""Products of matrices with emulated accumulators: the steps of `arithmetic.sums` for each result, or for some of a row at a time.

Formats, roundings and sizes are runtime numbers. Every loop takes the address of a `ProductJob` and some rows of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qsim_kernels.arithmetic.philox import SHARED
from qsim_kernels.arithmetic.sums import LEAST_OF_PRODUCTS, NO_EXPONENT
from qsim_kernels.meanings import numba as meaning
from qsim_kernels.numba.jobs import ROWS, WAITING, WIDTH, AlignedAdder, ProductJob, RoundedAdder, TwoStepAdder
from qsim_kernels.numba.loops.bits import (
    address_of,
    as_double,
    as_long,
    call,
    doubles,
    f32,
    i64,
    part,
    record_at,
    room_for_doubles,
    room_for_longs,
    room_for_shorts,
    shorts,
    u64,
    words,
)  # fmt: skip
from qsim_kernels.numba.loops.roundings import draw, of_sums
from qsim_kernels.numbers.grid import Mode
from qsim_kernels.numbers.sums import MOST_BLOCK

_ROW = 8 * WIDTH
_TERM, _TOTAL, _LOST, _DRAWN, _WAITING, _NOISE_AT = 0, _ROW, 2 * _ROW, 3 * _ROW, 7 * _ROW, ROWS * _ROW
_product_at, _aligned_at, _two_step_at, _rounded_at = map(record_at, (ProductJob, AlignedAdder, TwoStepAdder, RoundedAdder))
_nearest, _toward_zero = of_sums(Mode.NEAREST), of_sums(Mode.TOWARD_ZERO)
#: From here on, a unit with two steps adds infinities.
_BEYOND = 2.0**128


class TermRows(NamedTuple):
    """Addresses of numbers and exponents of a row and a column, from some product on, and the number of products."""

    a: int
    b: int
    exponents_a: int
    exponents_b: int
    size: int


@part
def _largest(largest, terms, first, every):
    """The largest of an exponent and those of every so many products."""
    a, b = shorts(terms.exponents_a), shorts(terms.exponents_b)
    for k in range(first, terms.size, every):
        largest = max(largest, i64(a[k]) + i64(b[k]))
    return largest


@part
def _largest_exponent(running, terms, adder):
    return _largest(running, terms, 0, 1)


@part
def _largest_exponents(terms, adder):
    return _largest(i64(LEAST_OF_PRODUCTS), terms, 0, 2), _largest(i64(LEAST_OF_PRODUCTS), terms, 1, 2)


def _truncated_sum(limits):
    """The exact sum of truncated numbers; products that are too large are infinite if a unit `limits` them."""

    @part
    def truncated_sum(total, terms, unit, adder, first, every):
        a, b, up = doubles(terms.a), doubles(terms.b), power(-unit)
        units = np.trunc(total * up)
        for k in range(first, terms.size, every):
            product = a[k] * b[k]
            if limits:
                product = product * np.inf if abs(product) >= _BEYOND else product
            units += np.trunc(product * up)
        return units * power(unit)

    return truncated_sum


@part
def _round_bits(bits, drawn, grid, is_nearest):
    return _nearest(bits, u64(0), grid, 0) if is_nearest else _toward_zero(bits, u64(0), grid, 0)


@part
def _to_single(x, drawn, grid, adder):
    return np.float64(f32(x))


_BITS = {"bits_of": as_long, "from_bits": as_double}
_ALIGNED = meaning.sums({**_BITS, "largest_exponent": _largest_exponent, "truncated_sum": _truncated_sum(False), "round_bits": _round_bits})
_TWO_STEP = meaning.sums({**_BITS, "largest_exponents": _largest_exponents, "truncated_sum": _truncated_sum(True), "onto_grid": _to_single})
power, _aligned_step, _two_step = _ALIGNED.power, _ALIGNED.aligned_step, _TWO_STEP.two_step


@part
def _terms(job, row, column, k, count):
    """The products of a row and a column, from one on."""
    a, b, x, y = job.a, job.b, row * job.length + k, (row // job.rows * job.columns + column) * job.length + k
    return TermRows(a.values + 8 * x, b.values + 8 * y, a.exponents + 2 * x, b.exponents + 2 * y, count)


@part
def _step(terms, start, block):
    """The products of the step that begins with one of them."""
    a, b, of_a, of_b = terms.a + 8 * start, terms.b + 8 * start, terms.exponents_a + 2 * start, terms.exponents_b + 2 * start
    return TermRows(a, b, of_a, of_b, min(block, terms.size - start))


@part
def _aligned(terms, adder):
    """One sum of aligned and truncated products."""
    total = 0.0
    for start in range(0, terms.size, adder.block):
        total = _aligned_step(total, _step(terms, start, adder.block), adder.grid, adder)
    return total + 0.0


@part
def _in_two_steps(terms, adder):
    """One sum of products that are added before the running sum."""
    total = 0.0
    for start in range(0, terms.size, adder.block):
        total = _two_step(total, _step(terms, start, adder.block), 0, adder)
    return total


@part
def _promoted(total, inner):
    """A total in float32 to which a short sum is added."""
    return np.float64(f32(f32(total) + f32(inner)))


def _rows(adder_at, sum_of):
    """The loop for rows of a product whose sums a function computes; they may be promoted."""

    def rows(job_at, first, count):
        job = _product_at(job_at)
        out, adder = doubles(job.out), adder_at(job.adder)
        for row in range(first, first + count):
            for column in range(job.columns):
                total = 0.0
                for k in range(0, job.length, job.every):
                    inner = sum_of(_terms(job, row, column, k, min(job.every, job.length - k)), adder)
                    total = _promoted(total, inner) if job.promoted else inner
                out[row * job.columns + column] = total

    return rows


aligned, two_step = _rows(_aligned_at, _aligned), _rows(_two_step_at, _in_two_steps)


@part
def _dot(terms):
    """The exact sum of some products, in any order."""
    a, b, even, odd = doubles(terms.a), doubles(terms.b), 0.0, 0.0
    for k in range(0, terms.size - 1, 2):
        even += a[k] * b[k]
        odd += a[k + 1] * b[k + 1]
    return even + odd + (a[terms.size - 1] * b[terms.size - 1] if terms.size & 1 else 0.0)


def exact_groups(job_at, first, count):
    """Rows of a product whose sums are `BlockScaledSum`s of groups of products that are added exactly.

    The groups of a step are its terms: products of the sums of their products times scales, and of ones.
    """
    job = _product_at(job_at)
    out, adder, groups = doubles(job.out), _aligned_at(job.adder), -(-job.length // job.group)
    scales_a, scales_b = doubles(job.a.scales), doubles(job.b.scales)
    exponents_a, exponents_b = shorts(job.a.exponents), shorts(job.b.exponents)
    values, ones = room_for_doubles(MOST_BLOCK), room_for_doubles(MOST_BLOCK)
    exponents, zeros = room_for_shorts(MOST_BLOCK), room_for_shorts(MOST_BLOCK)
    for i in range(MOST_BLOCK):
        ones[i], zeros[i] = 1.0, 0
    for row in range(first, first + count):
        for column in range(job.columns):
            total, terms = 0.0, _terms(job, row, column, 0, job.length)
            x, y = row * groups, (row // job.rows * job.columns + column) * groups
            for start in range(0, job.length, adder.block):
                size = i64(0)
                for begin in range(start, min(start + adder.block, job.length), job.group):
                    i = begin // job.group
                    value = _dot(_step(terms, begin, job.group))
                    values[size] = value * (scales_a[x + i] * scales_b[y + i])
                    exponents[size] = exponents_a[x + i] + exponents_b[y + i] if value != 0 else NO_EXPONENT
                    size += 1
                step = TermRows(address_of(values), address_of(ones), address_of(exponents), address_of(zeros), size)
                total = _aligned_step(total, step, adder.grid, adder)
            out[row * job.columns + column] = total + 0.0


@part
def _take(room, index, draws, count, stride):
    """Copy the random bits of some roundings of each element."""
    noise = words(room + _NOISE_AT)
    for j in range(draws if stride else 0):
        drawn = words(room + _DRAWN + j * _ROW)
        for i in range(count):
            drawn[i] = noise[index + j + i * stride]


@part
def _write_terms(job, adder, chunk_adder, room, row, begin, k, length, count):
    """Write the terms of some elements that begin with product `k`, one product or a chunk of at most `length`."""
    into = doubles(room + _TERM)
    if adder.chunk == 1:
        left = doubles(job.a.values)[row * job.length + k]
        right = doubles(job.b.values + 8 * ((row // job.rows * job.length + k) * job.columns + begin))
        for i in range(count):
            into[i] = left * right[i]
    else:
        for i in range(count):
            into[i] = _aligned(_terms(job, row, begin + i, k, length), chunk_adder)


@part
def _rounded(job, adder, chunk_adder, room, row, begin, k, length, at, count):
    """Write sums of some elements from product `k` on; `at` is the place of the first element's random bits."""
    number, total, lost = -(-length // adder.chunk), doubles(room + _TOTAL), doubles(room + _LOST)
    sizes, firsts, depth = room_for_longs(WAITING), room_for_longs(WAITING), i64(0)
    for i in range(count):
        total[i], lost[i] = 0.0, 0.0
    for j in range(number):
        index, start = at + j * adder.roundings, j * adder.chunk
        _write_terms(job, adder, chunk_adder, room, row, begin, k + start, min(adder.chunk, length - start), count)
        if adder.product:
            _take(room, index, 1, count, job.stride)
            call(adder.product, (room + _TERM, i64(0), i64(0), room + _DRAWN, count, adder.product_grid))
            index += 1
        if not adder.leaf:
            _take(room, index, adder.draws, count, job.stride)
            call(adder.step, (room + _TOTAL, room + _TERM, room + _LOST, room + _DRAWN, count, adder.grid))
            continue
        _take(room, index, 1, count, job.stride)
        call(adder.leaf, (room + _TERM, i64(0), i64(0), room + _DRAWN, count, adder.grid))
        _copy(room + _WAITING + depth * _ROW, room + _TERM, count)
        sizes[depth], firsts[depth] = 1, j
        depth += 1
        while depth > 1 and (sizes[depth - 1] == sizes[depth - 2] or j == number - 1):
            left = room + _WAITING + (depth - 2) * _ROW
            _take(room, at + firsts[depth - 1] * adder.roundings - 1, 1, count, job.stride)
            call(adder.step, (left, left + _ROW, i64(0), room + _DRAWN, count, adder.grid))
            sizes[depth - 2] += sizes[depth - 1]
            depth -= 1
    if adder.leaf and number:
        _copy(room + _TOTAL, room + _WAITING, count)


@part
def _copy(into_at, x_at, count):
    """Copy numbers."""
    into, x = doubles(into_at), doubles(x_at)
    for i in range(count):
        into[i] = x[i]


@part
def _draw(job, room, index, count):
    """Draw the random bits of so many indices; return the place of the first."""
    first = job.noise.offset + index
    draw(words(room + _NOISE_AT), count // SHARED + 1, u64(first // SHARED), u64(job.noise.seed), u64(job.noise.stream))
    return first % SHARED


def rounded(job_at, first, count):
    """Rows of a product whose sums are `RoundedSum`s, or promoted; `b` is transposed only if terms are chunks."""
    job = _product_at(job_at)
    adder, chunk_adder = _rounded_at(job.rounded), _aligned_at(job.adder)
    room = job.room + 8 * job.words * (first // job.part)
    total = doubles(room + _TOTAL)
    for row in range(first, first + count):
        for begin in range(0, job.columns, job.width):
            size, at = min(job.width, job.columns - begin), i64(0)
            result = doubles(job.out + 8 * (row * job.columns + begin))
            if job.stride:
                at = _draw(job, room, (row * job.columns + begin) * job.stride, job.stride * size)
            for i in range(size):
                result[i] = 0.0
            for k in range(0, job.length, job.every):
                length = min(job.every, job.length - k)
                _rounded(job, adder, chunk_adder, room, row, begin, k, length, at + k // job.every * job.inner, size)
                for i in range(size):
                    result[i] = _promoted(result[i], total[i]) if job.promoted else total[i]
