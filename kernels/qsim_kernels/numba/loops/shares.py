"""The function that threads run at once to share a loop."""

from __future__ import annotations

from qsim_kernels.numba.loops.bits import add_at, call, numbers


def share(work_at):
    """Run parts of a loop that no other thread has taken, until none is left; `work_at` is the address of a `jobs.SharedLoop`."""
    _, size, end, loop, job_at = numbers(work_at, 5)
    start = add_at(work_at, size)
    while start < end:
        call(loop, (job_at, start, min(size, end - start)))
        start = add_at(work_at, size)
