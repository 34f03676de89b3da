"""The checksum of a tensor's elements; see `qsim_kernels.torch.checksum`."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.meanings.numba import mixing
from qsim_kernels.numba.jobs import Summands
from qsim_kernels.numba.loops.bits import add_at, ints, part, record_at, shorts

_i64: Any = np.int64
_mixed = mixing.mixed
_job_at = record_at(Summands)


def checksum(job_at, first, rows):
    """Add the mixed bits of some rows of elements to a sum; `job_at` is the address of a `Summands` of `numba.jobs`."""
    job = _job_at(job_at)
    for row in range(first, first + rows):
        start = row * job.row
        end, index = min(start + job.row, job.size), job.offset + row * job.stride
        add_at(job.sum, _sum(shorts(job.x), start, end, index) if job.is_narrow else _sum(ints(job.x), start, end, index))


@part
def _sum(words, start, end, index):
    total = _i64(0)
    for i in range(start, end):
        total += _mixed(_i64(words[i]), index + i - start)
    return total
