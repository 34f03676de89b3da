"""One step of Adam or SGD for consecutive elements of one parameter: every tensor is read and written once, strip by strip.

The operations are those of `arithmetic.updates`. The first argument of the loops is the address
of an `Update` of `compiled.jobs`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.meanings.numba import updates as rules
from qsim_kernels.numba.loops.bits import address_of, as_float, call, ints, longs, part, room_for_floats
from qsim_kernels.numba.loops.noise import SERVED
from qsim_kernels.numba.loops.strips import STRIP
from qsim_kernels.numba.loops.values import load, store
from qsim_kernels.numbers.carrier import SINGLE
from qsim_kernels.numbers.updates import Factors, UpdateVariant

# The bits of `Update.flags`.
_MAXIMIZES, _DECAYS_GRADIENT, _DECAYS_WEIGHT = 1, 2, 4
_INFINITY, _NAN = SINGLE.infinity, SINGLE.nan
#: Signs, scales and decay are applied before and after.
_PLAIN = UpdateVariant(*[False] * len(UpdateVariant._fields))
_i32: Any = np.int32
_f32: Any = np.float32


def _adam(amsgrad):
    """The loop of Adam, with or without the largest second moments."""
    rule = rules(_PLAIN._replace(moment=True, amsgrad=amsgrad)).adam

    def adam(job_at, start, count):
        job, at, end = longs(job_at), start, start + count
        factors = _factors(job)
        weight, grad, change = room_for_floats(STRIP), room_for_floats(STRIP), room_for_floats(STRIP)
        first, second, largest = room_for_floats(STRIP), room_for_floats(STRIP), room_for_floats(STRIP)
        while at < end:
            index, size = _place(job, at, end)
            _begin(job, at, size, weight, grad)
            _read(first, job[2], at, size, job[8])
            _read(second, job[3], at, size, job[8])
            if amsgrad:
                _read(largest, job[4], at, size, job[8])
            for i in range(size):
                before = largest[i] if amsgrad else _f32(0)
                change[i], first[i], second[i], after = rule(grad[i], first[i], second[i], before, factors, 0, 0)
                if amsgrad:
                    largest[i] = after
            _finish(job, at, size, index, weight, change)
            _write(job, 2, job[2], at, size, index, first, 1)
            _write(job, 2, job[3], at, size, index, second, 2)
            if amsgrad:
                # The largest second moment was itself a second moment, so it uses the same random bits.
                _write(job, 2, job[4], at, size, index, largest, 2)
            at += size

    return adam


def _sgd(moment, nesterov):
    """The loop of stochastic gradient descent, with or without momentum."""
    rule = rules(_PLAIN._replace(moment=moment, nesterov=nesterov)).sgd

    def sgd(job_at, start, count):
        job, at, end = longs(job_at), start, start + count
        factors = _factors(job)
        weight, grad, first = room_for_floats(STRIP), room_for_floats(STRIP), room_for_floats(STRIP)
        while at < end:
            index, size = _place(job, at, end)
            _begin(job, at, size, weight, grad)
            if moment:
                _read(first, job[2], at, size, job[8])
            for i in range(size):
                grad[i], after = rule(grad[i], first[i] if moment else _f32(0), factors, 0, 0)
                if moment:
                    first[i] = after
            _finish(job, at, size, index, weight, grad)
            if moment:
                _write(job, 2, job[2], at, size, index, first, 1)
            at += size

    return sgd


adam, amsgrad = _adam(False), _adam(True)
sgd, momentum, nesterov = _sgd(False, False), _sgd(True, False), _sgd(True, True)


@part
def _factors(job):
    """The `Factors` of a job."""
    return Factors(
        _factor(job[10]), _factor(job[11]), _factor(job[12]), _factor(job[13]), _factor(job[14]),
        _factor(job[15]), _factor(job[16]), _factor(job[17]), _factor(job[18]), _factor(job[19]),
    )  # fmt: skip


@part
def _factor(bits):
    return as_float(_i32(bits))


@part
def _place(job, at, end):
    """The index of an element's random bits, and the size of its strip, whose elements' indices are consecutive."""
    offset, row, stride = job[20], job[21], job[22]
    if row:
        index, size = offset + at // row * stride + at % row, min(end - at, row - at % row)
    else:
        index, size = offset + at, end - at
    return index, min(size, STRIP - index % SERVED)


@part
def _read(values, x_at, start, count, is_narrow):
    """Read float32 values."""
    load(ints(address_of(values)), x_at, start, count, is_narrow != 0)


@part
def _begin(job, at, size, weight, grad):
    """Read weights and gradients, scale these, and add a decay that is not decoupled."""
    _read(weight, job[0], at, size, job[6])
    _read(grad, job[1], at, size, job[7])
    scale, decay = _factor(job[10]), _factor(job[19])
    if job[9] & _MAXIMIZES:
        scale = _f32(-scale)
    for i in range(size):
        grad[i] = _f32(grad[i] * scale)
    if job[9] & _DECAYS_GRADIENT:
        for i in range(size):
            grad[i] = _f32(grad[i] + _f32(weight[i] * decay))


@part
def _finish(job, at, size, index, weight, change):
    """Add a decoupled decay to an update, and write the new weights."""
    decay = _factor(job[19])
    if job[9] & _DECAYS_WEIGHT:
        for i in range(size):
            change[i] = _f32(change[i] + _f32(weight[i] * decay))
    if job[5]:
        _compensated(job, at, size, index, weight, change)
        return
    for i in range(size):
        change[i] = _f32(weight[i] - change[i])
    _write(job, 0, job[0], at, size, index, change, 0)


@part
def _compensated(job, at, size, index, weight, change):
    """Kahan's summation: the rounding error of a weight is added back in the next step."""
    lost, total, rounded = room_for_floats(STRIP), room_for_floats(STRIP), room_for_floats(STRIP)
    _read(lost, job[5], at, size, job[6])
    for i in range(size):
        change[i] = _f32(_f32(-change[i]) - lost[i])
        total[i] = _f32(weight[i] + change[i])
    _round(job, 0, rounded, total, size, index, 0)
    for i in range(size):
        lost[i] = _f32(_f32(rounded[i] - weight[i]) - change[i])
    _write(job, 1, job[5], at, size, index, lost, 0)
    _write(job, 0, job[0], at, size, index, rounded, 0)


@part
def _write(job, which, out_at, at, size, index, values, role):
    """Round a strip and write it; see `_round`."""
    results = room_for_floats(STRIP)
    _round(job, which, results, values, size, index, role)
    store(out_at, at, ints(address_of(results)), size, job[8 if which == 2 else 6] != 0)


@part
def _round(job, which, results, values, size, index, role):
    """Round a strip: weights (0), compensations (1) or states (2), with the random bits of a role."""
    strip, how, masks, key = job[23 + 3 * which], job[24 + 3 * which], job[25 + 3 * which], 32 + 2 * role
    if masks:
        # An infinity becomes NaN, so that a step that went wrong stays visible.
        patterns = ints(address_of(values))
        for i in range(size):
            magnitude = _i32(patterns[i] & _NAN)
            patterns[i] = _i32(_NAN) if magnitude == _INFINITY else patterns[i]
    call(strip, (address_of(results), address_of(values), size, how, job[key], job[key + 1], index))
