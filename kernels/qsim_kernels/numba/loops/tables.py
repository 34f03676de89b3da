"""Lookups in tables of codes and values."""

from __future__ import annotations

from qsim_kernels.numba.jobs import LookUp
from qsim_kernels.numba.loops.bits import bytes_, halves, part, record_at, wide_words, words

_job_at = record_at(LookUp)


def look_up(job_at, start, count):
    """Look up some unsigned indices in a table; `job_at` is the address of a `LookUp` of `numba.jobs`."""
    job = _job_at(job_at)
    if job.index_size == 2:
        _copy(bytes_(job.out), halves(job.indices), start, count, bytes_(job.table))
    elif job.entry_size == 1:
        _copy(bytes_(job.out), bytes_(job.indices), start, count, bytes_(job.table))
    elif job.entry_size == 2:
        _copy(halves(job.out), bytes_(job.indices), start, count, halves(job.table))
    elif job.entry_size == 4:
        _copy(words(job.out), bytes_(job.indices), start, count, words(job.table))
    else:
        _copy(wide_words(job.out), bytes_(job.indices), start, count, wide_words(job.table))


@part
def _copy(out, indices, start, count, table):
    for i in range(start, start + count):
        out[i] = table[indices[i]]
