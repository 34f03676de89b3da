"""Scales of tiles with given largest magnitudes, as `arithmetic.scales` defines them: a loop for each rule, made when it is asked for."""

from __future__ import annotations

from typing import Any

from qsim_kernels.meanings import numba as meaning
from qsim_kernels.numba.jobs import ScalesJob
from qsim_kernels.numba.loops.bits import as_double, as_long, f32, f64, floats, record_at, room_for_floats
from qsim_kernels.numbers.scales import ScaleRule

#: Scales that are computed at once.
_AT_ONCE = 256
_job_at = record_at(ScalesJob)


def __getattr__(name: str) -> Any:
    """The loop of a rule, by its name in lower case."""
    if name.upper() not in ScaleRule.__members__:
        raise AttributeError(f"no rule of scales has the name {name!r}")
    scale_of = meaning.scales(int(ScaleRule[name.upper()])).scale_of

    def scales(job_at, first, count):
        """Write some of the scales, float32, which may replace the magnitudes."""
        job, given = _job_at(job_at), room_for_floats(_AT_ONCE)
        for start in range(first, first + count, _AT_ONCE):
            out, amaxes, size = floats(job.out + 4 * start), floats(job.amaxes + 4 * start), min(_AT_ONCE, first + count - start)
            # Loops vectorize only if they do not write where they read.
            for i in range(size):
                given[i] = amaxes[i]
            for i in range(size):
                out[i] = f32(as_double(scale_of(as_long(f64(given[i]) / job.whole), 0, job.numbers, 0, 0)))

    return scales
