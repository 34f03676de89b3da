"""The checksum of a tensor's elements, and counts and sums of rounding outcomes; see `qsim_kernels.torch.reductions`."""

from __future__ import annotations

from qsim_kernels.meanings.numba import mixing
from qsim_kernels.numba.jobs import STRIP, Outcomes, Summands
from qsim_kernels.numba.loops.bits import add_at, as_float, doubles, f64, i64, ints, part, record_at, room_for_ints, room_for_longs, shorts
from qsim_kernels.numba.loops.values import load
from qsim_kernels.numbers import tallies
from qsim_kernels.numbers.carrier import SINGLE

_SIZE, _ZERO, _NAN = tallies.SIZE, tallies.ZERO, tallies.NAN
_SATURATED, _UNDERFLOWED, _EXACT = tallies.SATURATED, tallies.UNDERFLOWED, tallies.EXACT
_MANTISSA, _INFINITY, _MAGNITUDE = SINGLE.mantissa, SINGLE.infinity, SINGLE.nan
_summands_at, _outcomes_at = map(record_at, (Summands, Outcomes))
_mixed = mixing.mixed


def checksum(job_at, first, rows):
    """Add the mixed bits of some rows of elements to a sum; `job_at` is the address of a `Summands` of `numba.jobs`."""
    job = _summands_at(job_at)
    for row in range(first, first + rows):
        start = row * job.row
        end, index = min(start + job.row, job.size), job.offset + row * job.stride
        add_at(job.sum, _sum(shorts(job.x), start, end, index) if job.is_narrow else _sum(ints(job.x), start, end, index))


@part
def _sum(words, start, end, index):
    total = i64(0)
    for i in range(start, end):
        total += _mixed(i64(words[i]), index + i - start)
    return total


def tally(job_at, first, strips):
    """Add some strips to the counts, and write their sums, which are added later in a fixed order.

    `job_at` is the address of an `Outcomes` of `numba.jobs`.
    """
    job = _outcomes_at(job_at)
    sums, counts = doubles(job.sums), room_for_longs(_SIZE)
    x, rounded = room_for_ints(STRIP), room_for_ints(STRIP)
    for i in range(_SIZE):
        counts[i] = 0
    for strip in range(first, first + strips):
        start = strip * STRIP
        count = min(STRIP, job.size - start)
        load(x, job.x.at, start, count, job.x.is_narrow != 0)
        load(rounded, job.rounded.at, start, count, job.rounded.is_narrow != 0)
        for i in range(count):
            counts[(x[i] & _MAGNITUDE) >> _MANTISSA] += 1
        _add_facts(counts, x, rounded, count, job.low, job.high)
        sums[2 * strip], sums[2 * strip + 1] = _squares(x, rounded, count)
    for i in range(_SIZE):
        add_at(job.counts + 8 * i, counts[i])


@part
def _add_facts(counts, x, rounded, count, low, high):
    zeros, nans, saturated, underflowed, exact = 0, 0, 0, 0, 0
    for i in range(count):
        before, after = f64(as_float(x[i])), f64(as_float(rounded[i]))
        beyond = (before > high) | (before < low)
        zeros += before == 0
        nans += before != before
        saturated += beyond
        underflowed += (after == 0) & (before != 0) & (not beyond)
        exact += (after == before) & (not beyond)
    counts[_ZERO] += zeros
    counts[_NAN] += nans
    counts[_SATURATED] += saturated
    counts[_UNDERFLOWED] += underflowed
    counts[_EXACT] += exact


@part
def _squares(x, rounded, count):
    """The sums of squares and of squared differences where both numbers are finite."""
    signal, noise = f64(0), f64(0)
    for i in range(count):
        before, after = f64(as_float(x[i])), f64(as_float(rounded[i]))
        is_finite = ((x[i] & _MAGNITUDE) < _INFINITY) & ((rounded[i] & _MAGNITUDE) < _INFINITY)
        signal += before * before if is_finite else f64(0)
        noise += (after - before) * (after - before) if is_finite else f64(0)
    return signal, noise
