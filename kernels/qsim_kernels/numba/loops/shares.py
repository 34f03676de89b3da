"""The function that threads run at once to share a loop."""

from __future__ import annotations

from qsim_kernels.numba.jobs import SharedLoop
from qsim_kernels.numba.loops.bits import add_at, call, record_at

_shared_at = record_at(SharedLoop)


def share(work_at):
    """Run parts of a loop that no other thread has taken, until none is left; `work_at` is the address of a `jobs.SharedLoop`."""
    work = _shared_at(work_at)
    start = add_at(work_at, work.part)
    while start < work.end:
        call(work.loop, (work.job, start, min(work.part, work.end - start)))
        start = add_at(work_at, work.part)
