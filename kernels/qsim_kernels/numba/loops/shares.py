"""The functions that run a loop: in one thread, and in threads that share it."""

from __future__ import annotations

from qsim_kernels.numba.jobs import LoneLoop, SharedLoop
from qsim_kernels.numba.loops.bits import add_at, call, record_at

_lone_at, _shared_at = record_at(LoneLoop), record_at(SharedLoop)
#: Bytes of a `LoneLoop`.
_SIZE = 8 * len(LoneLoop._fields)


def alone(work_at):
    """Run a whole loop; `work_at` is the address of a `jobs.LoneLoop`."""
    work = _lone_at(work_at)
    call(work.loop, (work_at + _SIZE, 0, work.end))


def share(work_at):
    """Run parts of a loop that no other thread has taken, until none is left; `work_at` is the address of a `jobs.SharedLoop`."""
    work = _shared_at(work_at)
    start = add_at(work_at, work.part)
    while start < work.end:
        call(work.loop, (work.job, start, min(work.part, work.end - start)))
        start = add_at(work_at, work.part)
