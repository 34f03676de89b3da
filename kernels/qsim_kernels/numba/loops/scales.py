"""The scales of tiles with given largest magnitudes; the steps are those of `qsim_kernels.torch.scaling.scales_of`."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.numba.loops.bits import address_of, as_double, as_long, floats, inlined, longs, part, room_for_floats
from qsim_kernels.numba.loops.roundings import double_at, of_scales
from qsim_kernels.numbers.carrier import DOUBLE
from qsim_kernels.numbers.grid import Mode
from qsim_kernels.numbers.scales import ScaleRule

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
        if job[3] == _CEIL:
            _rounded_up(out, given, size, job)
        elif job[3] == _FIT:
            _rounded_to_nearest(out, given, size, job)
        else:
            _by_exponent(out, given, size, job, job[3] == _EVEN)


def _by_quotient(round_bits):
    """A function that writes the scales which follow from quotients, with one rounding."""

    @part
    def by_quotient(out, amaxes, count, job):
        under, margin, largest, least = as_double(job[2]), as_double(job[4]), as_double(job[5]), as_double(job[7])
        grid, _ = double_at(address_of(job) + 64)
        for i in range(count):
            a = _f64(amaxes[i]) / under
            wanted = as_long(_f64(_f64(a * margin) / largest))
            out[i] = _chosen(a, as_double(round_bits(wanted, _u64(0), grid, 0)), least)

    return by_quotient


_rounded_up, _rounded_to_nearest = _by_quotient(_up), _by_quotient(_nearest)


@part
def _by_exponent(out, amaxes, count, job, is_even):
    under, margin, largest, mantissa, least = as_double(job[2]), job[4] >> _MANTISSA, job[5] >> _MANTISSA, job[6], as_double(job[7])
    grid, _ = double_at(address_of(job) + 64)
    spare = _MANTISSA - mantissa if is_even else _i64(1)
    half = (_i64(1) << (spare - 1)) - 1 if is_even else _i64(0)
    for i in range(count):
        a = _f64(amaxes[i]) / under
        bits = as_long(a)
        bits = bits + half + ((bits >> spare) & 1) >> spare << spare if is_even else bits
        field = (bits >> _MANTISSA) - largest + margin
        wanted = min(max(field, _i64(1)), _i64(2 * _BIAS)) << _MANTISSA
        out[i] = _chosen(a, as_double(_nearest(wanted, _u64(0), grid, 0)), least)


@inlined
def _chosen(a, rounded, least):
    """The scale of a magnitude, given the value of its grid that follows from it."""
    scale = least if a == 0 else max(rounded, least)
    return _f32(scale) if (as_long(a) & _NAN) < _INFINITY else _f32(np.nan)
