"""Products of matrices with emulated accumulators, in loops compiled by Numba: some elements of a row of the result at a time.

They go through the steps of `qsim_kernels.reference.sums`, in float64. Formats, roundings and sizes are runtime numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from qsim_kernels.carrier import DOUBLE, NOISE_BITS
from qsim_kernels.compiled.loops.bits import as_double, as_long
from qsim_kernels.compiled.loops.noise import SERVED, draw
from qsim_kernels.grid import Mode
from qsim_kernels.sums import LEAST_EXPONENT, Order

#: The exponent of zero, below those of all products.
NONE = -4096
_MANTISSA, _BIAS, _INFINITY, _NAN, _NOISE = DOUBLE.mantissa, DOUBLE.bias, DOUBLE.infinity, DOUBLE.nan, NOISE_BITS
_PAIRWISE, _KAHAN = int(Order.PAIRWISE), int(Order.KAHAN)
#: Sums of a tree that wait for one of as many terms: one for each bit of the number of terms.
_WAITING = 64
#: Elements of a row that are computed together, and the most random numbers that are drawn for them at once.
_WIDTH, _NUMBERS = 128, 1 << 15
_i64: Any = np.int64
_u64: Any = np.uint64
_f32: Any = np.float32
# As int64, because Numba compiles what takes them for each value of a Python int.
_NEAREST, _NEAREST_AWAY, _NEAREST_UP, _TOWARD_ZERO, _UP, _DOWN, _ODD, _STOCHASTIC = map(_i64, Mode)


class Onto(NamedTuple):
    """A rounding of float64 numbers: the numbers of a `carrier.Plan` and of a `Rule`."""

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
    mode: int
    bits: int
    correction: bool
    saturate: bool


class Unit(NamedTuple):
    """A matrix unit: an `Aligned` sum."""

    onto: Onto
    end: float
    low: int
    block: int
    fraction: int


class Course(NamedTuple):
    """A `Rounded` sum; without a product's rounding its place is taken by that of sums, and with `chunk=1` any unit will do."""

    onto: Onto
    product: Onto
    has_product: bool
    unit: Unit
    chunk: int
    order: int
    roundings: int
    draws: bool


# LLVM inlines it, not Numba, which would analyze a copy for each mode of each loop: most of the time to compile them.
@numba.njit(error_model="numpy", forceinline=True)
def _onto(x, raw, how, mode):
    """Round a number onto a grid; see `reference.rounding.round_bits`. Nothing returns early, so that loops over this are vectorized.

    Args:
        x: A float64 number.
        raw: 32 random bits.
        how: An `Onto`.
        mode: Its mode, as a constant.
    """
    bits = as_long(x)
    magnitude = bits & _NAN
    negative, inexact, is_nan = bits < 0, magnitude > 0, magnitude > _INFINITY
    shift = min(max(how.low + how.shift - (magnitude >> _MANTISSA), how.shift), _MANTISSA) if how.low else how.shift
    ones = (_i64(1) << shift) - 1
    if mode == _NEAREST:
        last = ((magnitude ^ how.parity) >> shift) & (_i64(1) if how.shift else ones & 1)
        added, leaves = last + (ones >> 1), magnitude > how.half
    elif mode == _NEAREST_AWAY:
        added, leaves = (ones + 1) >> 1, inexact & (magnitude >= how.half)
    elif mode == _NEAREST_UP:
        added = (ones + 1 - _i64(negative)) >> 1
        leaves = inexact & (magnitude >= how.half + _i64(negative))
    elif mode == _TOWARD_ZERO:
        added, leaves = _i64(0), False
    elif mode == _UP:
        added, leaves = _i64(0) if negative else ones, inexact & (bits >= 0)
    elif mode == _DOWN:
        added, leaves = ones if negative else _i64(0), inexact & negative
    elif mode == _ODD:
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
    inward = mode == _TOWARD_ZERO or (mode == _UP and below) or (mode == _DOWN and not below)
    stops = how.saturate | (inward & (magnitude < _INFINITY))
    end = (how.floor if below else how.top) if stops else (how.under if below else how.over)
    rounded = end if rounded > (how.bottom if below else how.top) else rounded
    keeps_sign = how.signed & (how.negative_zero | (rounded != 0))
    is_nan = is_nan | (rounded > _INFINITY)
    rounded = rounded | (bits & ~_i64(_NAN)) if keeps_sign else rounded
    return as_double(_i64(_NAN) if is_nan else rounded)


@numba.njit(error_model="numpy")
def _round_row(x, raw, how):
    """Round numbers in place; the mode is a constant of each loop."""
    if how.mode == _NEAREST:
        for i in range(len(x)):
            x[i] = _onto(x[i], _u64(0), how, _NEAREST)
    elif how.mode == _NEAREST_AWAY:
        for i in range(len(x)):
            x[i] = _onto(x[i], _u64(0), how, _NEAREST_AWAY)
    elif how.mode == _NEAREST_UP:
        for i in range(len(x)):
            x[i] = _onto(x[i], _u64(0), how, _NEAREST_UP)
    elif how.mode == _TOWARD_ZERO:
        for i in range(len(x)):
            x[i] = _onto(x[i], _u64(0), how, _TOWARD_ZERO)
    elif how.mode == _UP:
        for i in range(len(x)):
            x[i] = _onto(x[i], _u64(0), how, _UP)
    elif how.mode == _DOWN:
        for i in range(len(x)):
            x[i] = _onto(x[i], _u64(0), how, _DOWN)
    elif how.mode == _ODD:
        for i in range(len(x)):
            x[i] = _onto(x[i], _u64(0), how, _ODD)
    else:
        for i in range(len(x)):
            x[i] = _onto(x[i], raw[i], how, _STOCHASTIC)


@numba.njit(error_model="numpy")
def _add_row(into, x, y, factor, raw, how):
    """Write the sums of numbers and of others times 1 or -1, rounded once: first to odd, then onto a grid."""
    for i in range(len(into)):
        first, second = x[i], y[i] * factor
        near = first + second
        from_second = near - first
        rest = (first - (near - from_second)) + (second - from_second)
        bits = as_long(near)
        missing = (rest != 0) & ((bits & _NAN) < _INFINITY)
        odd = bits - _i64((as_long(rest) ^ bits) < 0) | 1
        into[i] = as_double(odd if missing else bits)
    _round_row(into, raw, how)


@numba.njit
def _aligned(a, b, exponents_a, exponents_b, unit):
    """A sum of aligned and truncated products."""
    total = 0.0
    for start in range(0, len(a), unit.block):
        stop = min(start + unit.block, len(a))
        largest = min(max((as_long(total) >> _MANTISSA & 0x7FF) - _BIAS, unit.low), 512) if total != 0 else _i64(LEAST_EXPONENT)
        for k in range(start, stop):
            largest = max(largest, _i64(exponents_a[k]) + _i64(exponents_b[k]))
        up = as_double(_i64(unit.fraction - largest + _BIAS) << _MANTISSA)
        units = np.trunc(total * up)
        for k in range(start, stop):
            units += np.trunc(a[k] * b[k] * up)
        exact = units * as_double(_i64(largest - unit.fraction + _BIAS) << _MANTISSA)
        if abs(exact) >= unit.end:
            total = exact * np.inf
        elif unit.onto.mode == _NEAREST:
            total = _onto(exact, _u64(0), unit.onto, _NEAREST)
        else:
            total = _onto(exact, _u64(0), unit.onto, _TOWARD_ZERO)
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def aligned_loop(out, a, b, exponents_a, exponents_b, first, count, rows, every, unit):
    """Write some rows of a product whose sums are `Aligned`, or promoted every so many products.

    Args:
        out: `[batch * rows, columns]`, float32.
        a: `[batch * rows, length]`, float64.
        b: `[batch, columns, length]`, float64.
        exponents_a: Exponents of `a`, int16.
        exponents_b: Exponents of `b`, int16.
        first: The first row.
        count: The number of rows.
        rows: The number of rows of a matrix.
        every: The number of products in a chain; 0 for one chain that is not promoted.
        unit: A `Unit`.
    """
    length = a.shape[1]
    for row in range(first, first + count):
        batch = row // rows
        for column in range(b.shape[1]):
            x, y, of_x, of_y = a[row], b[batch, column], exponents_a[row], exponents_b[batch, column]
            if not every:
                out[row, column] = _aligned(x, y, of_x, of_y, unit)
                continue
            total = _f32(0)
            for start in range(0, length, every):
                part = slice(start, min(start + every, length))
                total = _f32(total + _f32(_aligned(x[part], y[part], of_x[part], of_y[part], unit)))
            out[row, column] = total


@numba.njit
def _bits_of(raw, noise, index, stride, draws):
    """The random bits of one rounding of some elements."""
    if draws:
        for i in range(len(raw)):
            raw[i] = noise[index + i * stride]
    return raw


@numba.njit
def _copy(into, x):
    """Copy numbers. An assignment to a slice would check shapes and format an error, which takes seconds to compile."""
    for i in range(len(x)):
        into[i] = x[i]


@numba.njit(error_model="numpy")
def _terms(into, j, a, b, exponents_a, exponents_b, how):
    """The terms number `j` of some elements, before a product's rounding."""
    if how.chunk == 1:
        own = b[j]
        for i in range(len(into)):
            into[i] = a[j] * own[i]
    else:
        part = slice(j * how.chunk, min((j + 1) * how.chunk, len(a)))
        for i in range(len(into)):
            into[i] = _aligned(a[part], b[i, part], exponents_a[part], exponents_b[i, part], how.unit)


@numba.njit(error_model="numpy")
def _rounded(total, a, b, exponents_a, exponents_b, noise, at, stride, how, room, waiting):
    """Write sums that are rounded after each term.

    Args:
        total: The results.
        a: The products' left factors.
        b: Their right factors; see `rounded_loop`.
        exponents_a: Exponents of `a`.
        exponents_b: Exponents of `b`.
        noise: 32 random bits for each rounding.
        at: Where those of the first element begin.
        stride: The number of each element's.
        how: A `Course`.
        room: Room for rows of numbers.
        waiting: Room for the sums of a tree that wait for one of as many terms.
    """
    count, each, n = -(-len(a) // how.chunk), how.roundings, len(total)
    term, due, after, gained, lost = room[0, :n], room[1, :n], room[2, :n], room[3, :n], room[4, :n]
    raw = np.zeros(n if how.draws else 0, np.uint64)
    sizes, firsts = np.zeros(_WAITING, np.int64), np.zeros(_WAITING, np.int64)
    total[:], lost[:], depth = 0.0, 0.0, 0
    for j in range(count):
        _terms(term, j, a, b, exponents_a, exponents_b, how)
        own = at + j * each
        if how.has_product:
            _round_row(term, _bits_of(raw, noise, own, stride, how.draws), how.product)
            own += 1
        if how.order == _PAIRWISE:
            _round_row(term, _bits_of(raw, noise, own, stride, how.draws), how.onto)
            _copy(waiting[depth], term)
            sizes[depth], firsts[depth] = 1, j
            depth += 1
            while depth > 1 and (sizes[depth - 1] == sizes[depth - 2] or j == count - 1):
                last = _bits_of(raw, noise, at + firsts[depth - 1] * each - 1, stride, how.draws)
                left, right = waiting[depth - 2, :n], waiting[depth - 1, :n]
                _add_row(left, left, right, 1.0, last, how.onto)
                sizes[depth - 2] += sizes[depth - 1]
                depth -= 1
        elif how.order == _KAHAN:
            _add_row(due, term, lost, -1.0, _bits_of(raw, noise, own, stride, how.draws), how.onto)
            _add_row(after, total, due, 1.0, _bits_of(raw, noise, own + 1, stride, how.draws), how.onto)
            _add_row(gained, after, total, -1.0, _bits_of(raw, noise, own + 2, stride, how.draws), how.onto)
            _add_row(lost, gained, due, -1.0, _bits_of(raw, noise, own + 3, stride, how.draws), how.onto)
            for i in range(n):
                lost[i] = lost[i] if np.isfinite(after[i]) else 0.0
                total[i] = after[i]
        else:
            _add_row(total, total, term, 1.0, _bits_of(raw, noise, own, stride, how.draws), how.onto)
    if how.order == _PAIRWISE and count:
        _copy(total, waiting[0, :n])


@numba.njit(nogil=True, cache=True, error_model="numpy")
def rounded_loop(out, a, b, exponents_a, exponents_b, first, count, rows, every, how, random):
    """Write some rows of a product whose sums are `Rounded`, or promoted every so many products.

    Args:
        out: `[batch * rows, columns]`, float64.
        a: `[batch * rows, length]`, float64.
        b: `[batch, length, columns]`, float64; with chunks `[batch, columns, length]`.
        exponents_a: Exponents of `a`, int16; `[1, 0]` without chunks.
        exponents_b: Exponents of `b`, int16; `[1, columns, 0]` without chunks.
        first: The first row.
        count: The number of rows.
        rows: The number of rows of a matrix.
        every: The number of products in a short sum; 0 for one sum that is not promoted.
        how: A `Course`.
        random: The seed, the stream, the offset, the number of indices of an element and of a short sum.
    """
    length, columns = a.shape[1], out.shape[1]
    seed, stream, offset, stride, inner = random
    width = min(columns, max(1, _NUMBERS // max(stride, 1)), _WIDTH)
    room, waiting = np.zeros((6, width)), np.zeros((_WAITING if how.order == _PAIRWISE else 0, width))
    noise = np.zeros(stride * width + SERVED, np.uint64)
    for row in range(first, first + count):
        batch = row // rows
        for begin in range(0, columns, width):
            n = min(width, columns - begin)
            own, at = room[5, :n], _i64(0)
            if how.draws:
                index = offset + _i64(row * columns + begin) * stride
                at = index % SERVED
                draw(noise, stride * n // SERVED + 1, _u64(index // SERVED), _u64(seed), _u64(stream), 32, False)
                for i in range(len(noise)):
                    noise[i] >>= _u64(_NOISE - 32)
            x, of_x = a[row], exponents_a[row if how.chunk > 1 else 0]
            columns_of = slice(begin, begin + n)
            of_y = exponents_b[batch if how.chunk > 1 else 0, columns_of]
            result = out[row, columns_of]
            result[:] = 0
            for i in range(-(-length // every) if every else 1):
                part = slice(i * every, min((i + 1) * every, length)) if every else slice(0, length)
                y = b[batch, columns_of, part] if how.chunk > 1 else b[batch, part, columns_of]
                _rounded(own, x[part], y, of_x[part], of_y[:, part], noise, at + i * inner, stride, how, room, waiting)
                for k in range(n):
                    result[k] = _f32(_f32(result[k]) + _f32(own[k])) if every else own[k]
