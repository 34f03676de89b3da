"""Lookups in tables of codes and values."""

from __future__ import annotations

from qsim_kernels.numba.loops.bits import bytes_, halves, numbers, part, wide_words, words


def look_up(job_at, start, count):
    """Look up some unsigned indices in a table; `job_at` is the address of a `LookUp` of `compiled.jobs`."""
    out_at, indices_at, table_at, entry_size, index_size = numbers(job_at, 5)
    if index_size == 2:
        _copy(bytes_(out_at), halves(indices_at), start, count, bytes_(table_at))
    elif entry_size == 1:
        _copy(bytes_(out_at), bytes_(indices_at), start, count, bytes_(table_at))
    elif entry_size == 2:
        _copy(halves(out_at), bytes_(indices_at), start, count, halves(table_at))
    elif entry_size == 4:
        _copy(words(out_at), bytes_(indices_at), start, count, words(table_at))
    else:
        _copy(wide_words(out_at), bytes_(indices_at), start, count, wide_words(table_at))


@part
def _copy(out, indices, start, count, table):
    for i in range(start, start + count):
        out[i] = table[indices[i]]
