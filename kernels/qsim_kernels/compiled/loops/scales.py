"""The scales of tiles with given largest magnitudes; the steps are those of `qsim_kernels.reference.scaling.scales_of`."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.carrier import DOUBLE
from qsim_kernels.compiled.loops.bits import address_of, as_double, as_long, floats, inlined, longs, part, room_for_floats
from qsim_kernels.compiled.loops.roundings import double_at, of_scales
from qsim_kernels.grid import Mode
from qsim_kernels.scales import ScaleRule

_BIAS, _MANTISSA, _INFINITY, _NAN = DOUBLE.bias, DOUBLE.mantissa, DOUBLE.infinity, DOUBLE.nan
_FIT, _CEIL, _EVEN = int(ScaleRule.FIT), int(ScaleRule.CEIL), int(ScaleRule.EVEN)
#: Scales that are computed at once.
_AT_ONCE = 256
_i64: Any = np.int64
_f64: Any = np.float64
_f32: Any = np.float32
_u64: Any = np.uint64
_nearest, _up = of_scales(Mode.NEAREST), of_scales(Mode.UP)


def scales(job_at, first, count):
    """Write some of the scales, float32, which may replace the magnitudes; `job_at` is the address of `compiled.jobs.making`."""
    job = longs(job_at)
    given = room_for_floats(_AT_ONCE)
    for start in range(first, first + count, _AT_ONCE):
        out, amaxes, size = floats(job[0] + 4 * start), floats(job[1] + 4 * start), min(_AT_ONCE, first + count - start)
        # Loops vectorize only if they do not write where they read.
        for i in range(size):
            given[i] = amaxes[i]
        if job[3] in (_FIT, _CEIL):
            _by_quotient(out, given, size, job)
        else:
            _by_exponent(out, given, size, job, job[3] == _EVEN)


@part
def _by_quotient(out, amaxes, count, job):
    under, margin, largest, least = as_double(job[2]), as_double(job[4]), as_double(job[5]), as_double(job[7])
    grid = double_at(address_of(job) + 72), job[8] != 0
    for i in range(count):
        a = _f64(amaxes[i]) / under
        out[i] = _chosen(a, _f64(_f64(a * margin) / largest), least, grid)


@part
def _by_exponent(out, amaxes, count, job, is_even):
    under, margin, largest, mantissa, least = as_double(job[2]), job[4] >> _MANTISSA, job[5] >> _MANTISSA, job[6], as_double(job[7])
    grid = double_at(address_of(job) + 72), job[8] != 0
    spare = _MANTISSA - mantissa if is_even else _i64(1)
    half = (_i64(1) << (spare - 1)) - 1 if is_even else _i64(0)
    for i in range(count):
        a = _f64(amaxes[i]) / under
        bits = as_long(a)
        bits = bits + half + ((bits >> spare) & 1) >> spare << spare if is_even else bits
        field = (bits >> _MANTISSA) - largest + margin
        wanted = as_double(min(max(field, _i64(1)), _i64(2 * _BIAS)) << _MANTISSA)
        out[i] = _chosen(a, wanted, least, grid)


@inlined
def _chosen(a, wanted, least, grid):
    """The scale of a magnitude, given what it should be before it is rounded onto its grid."""
    scale = max(_onto(wanted, grid), least)
    scale = least if a == 0 else scale
    return _f32(scale) if (as_long(a) & _NAN) < _INFINITY else _f32(np.nan)


@inlined
def _onto(wanted, grid):
    """Round a positive number onto a grid, up or to the nearest value."""
    values, is_up = grid
    bits = as_long(wanted)
    return as_double(_up(bits, _u64(0), values, 0) if is_up else _nearest(bits, _u64(0), values, 0))
