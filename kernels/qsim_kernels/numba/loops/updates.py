"""One step of Adam or SGD for consecutive elements of one parameter: every tensor is read and written once, strip by strip.

The operations are those of `arithmetic.updates`. The first argument of the loops is the address of an `UpdateJob` of `numba.jobs`.
"""

from __future__ import annotations

from qsim_kernels.arithmetic.philox import SHARED
from qsim_kernels.meanings.numba import updates as rules
from qsim_kernels.numba.jobs import STRIP, UpdateJob
from qsim_kernels.numba.loops.bits import address_of, call, f32, i32, ints, part, record_at, room_for_floats, types
from qsim_kernels.numba.loops.values import load, store
from qsim_kernels.numbers.carrier import SINGLE
from qsim_kernels.numbers.updates import Factors, UpdateVariant

_job_at = record_at(UpdateJob, {Factors: types.float32})
_INFINITY, _NAN = SINGLE.infinity, SINGLE.nan
#: Signs, scales and decay are applied before and after.
_PLAIN = UpdateVariant(*[False] * len(UpdateVariant._fields))
_kahan = rules(_PLAIN)
_change, _excess = _kahan.compensated, _kahan.excess


def _adam(amsgrad):
    """The loop of Adam, with or without the largest second moments."""
    rule = rules(_PLAIN._replace(moment=True, amsgrad=amsgrad)).adam

    def adam(job_at, start, count):
        job, at, end = _job_at(job_at), start, start + count
        weight, grad, change = room_for_floats(STRIP), room_for_floats(STRIP), room_for_floats(STRIP)
        first, second, largest = room_for_floats(STRIP), room_for_floats(STRIP), room_for_floats(STRIP)
        while at < end:
            index, size = _strip(job.place, at, end)
            _begin(job, at, size, weight, grad)
            _read(first, job.at.first, at, size, job.state_is_narrow)
            _read(second, job.at.second, at, size, job.state_is_narrow)
            if amsgrad:
                _read(largest, job.at.largest, at, size, job.state_is_narrow)
            for i in range(size):
                before = largest[i] if amsgrad else f32(0)
                change[i], first[i], second[i], after = rule(grad[i], first[i], second[i], before, job.factors, 0, 0)
                if amsgrad:
                    largest[i] = after
            _finish(job, at, size, index, weight, change)
            _write(job.at.first, at, size, first, job.moments, job.keys.first, index, job.state_is_narrow)
            _write(job.at.second, at, size, second, job.moments, job.keys.second, index, job.state_is_narrow)
            if amsgrad:
                # The largest second moment was itself a second moment, so it uses the same random bits.
                _write(job.at.largest, at, size, largest, job.moments, job.keys.second, index, job.state_is_narrow)
            at += size

    return adam


def _sgd(moment, nesterov):
    """The loop of stochastic gradient descent, with or without momentum."""
    rule = rules(_PLAIN._replace(moment=moment, nesterov=nesterov)).sgd

    def sgd(job_at, start, count):
        job, at, end = _job_at(job_at), start, start + count
        weight, grad, first = room_for_floats(STRIP), room_for_floats(STRIP), room_for_floats(STRIP)
        while at < end:
            index, size = _strip(job.place, at, end)
            _begin(job, at, size, weight, grad)
            if moment:
                _read(first, job.at.first, at, size, job.state_is_narrow)
            for i in range(size):
                grad[i], after = rule(grad[i], first[i] if moment else f32(0), job.factors, 0, 0)
                if moment:
                    first[i] = after
            _finish(job, at, size, index, weight, grad)
            if moment:
                _write(job.at.first, at, size, first, job.moments, job.keys.first, index, job.state_is_narrow)
            at += size

    return sgd


adam, amsgrad = _adam(False), _adam(True)
sgd, momentum, nesterov = _sgd(False, False), _sgd(True, False), _sgd(True, True)


@part
def _strip(place, at, end):
    """The index of an element's random bits, and the size of its strip, whose elements' indices are consecutive."""
    if place.row:
        index, size = place.offset + at // place.row * place.stride + at % place.row, min(end - at, place.row - at % place.row)
    else:
        index, size = place.offset + at, end - at
    return index, min(size, STRIP - index % SHARED)


@part
def _read(values, x_at, start, count, is_narrow):
    """Read float32 values."""
    load(ints(address_of(values)), x_at, start, count, is_narrow != 0)


@part
def _begin(job, at, size, weight, grad):
    """Read weights and gradients, scale these, and add a decay that is not decoupled."""
    _read(weight, job.at.param, at, size, job.param_is_narrow)
    _read(grad, job.at.grad, at, size, job.grad_is_narrow)
    scale, decay = job.factors.scale, job.factors.decay
    if job.variant.maximize:
        scale = f32(-scale)
    for i in range(size):
        grad[i] = f32(grad[i] * scale)
    if job.variant.coupled:
        for i in range(size):
            grad[i] = f32(grad[i] + f32(weight[i] * decay))


@part
def _finish(job, at, size, index, weight, change):
    """Add a decoupled decay to an update, and write the new weights."""
    decay = job.factors.decay
    if job.variant.decoupled:
        for i in range(size):
            change[i] = f32(change[i] + f32(weight[i] * decay))
    if job.at.compensation:
        _compensated(job, at, size, index, weight, change)
        return
    for i in range(size):
        change[i] = f32(weight[i] - change[i])
    _write(job.at.param, at, size, change, job.weights, job.keys.weights, index, job.param_is_narrow)


@part
def _compensated(job, at, size, index, weight, change):
    """Kahan's summation: the rounding error of a weight is added back in the next step."""
    lost, total, rounded = room_for_floats(STRIP), room_for_floats(STRIP), room_for_floats(STRIP)
    _read(lost, job.at.compensation, at, size, job.param_is_narrow)
    for i in range(size):
        change[i] = _change(change[i], lost[i], 0, 0)
        total[i] = f32(weight[i] + change[i])
    _round(rounded, total, size, job.weights, job.keys.weights, index)
    for i in range(size):
        lost[i] = _excess(rounded[i], weight[i], change[i], 0, 0)
    _write(job.at.compensation, at, size, lost, job.compensations, job.keys.weights, index, job.param_is_narrow)
    store(job.at.param, at, ints(address_of(rounded)), size, job.param_is_narrow != 0)


@part
def _write(out_at, at, size, values, stored, key, index, is_narrow):
    """Round a strip and write it; see `_round`."""
    results = room_for_floats(STRIP)
    _round(results, values, size, stored, key, index)
    store(out_at, at, ints(address_of(results)), size, is_narrow != 0)


@part
def _round(results, values, size, stored, key, index):
    """Round a strip by a `StoredRounding`."""
    if stored.masks:
        # An infinity becomes NaN, so that a step that went wrong stays visible.
        patterns = ints(address_of(values))
        for i in range(size):
            magnitude = i32(patterns[i] & _NAN)
            patterns[i] = i32(_NAN) if magnitude == _INFINITY else patterns[i]
    arguments = address_of(results), address_of(values), size, stored.rounding.grid, key.seed, key.stream, index
    call(stored.rounding.loop, arguments)
