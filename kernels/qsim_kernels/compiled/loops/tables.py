"""Lookups in tables of codes and values."""

from __future__ import annotations

from qsim_kernels.compiled.loops.bits import bytes_, halves, part, wide_words, words


def look_up(out_at, places_at, start, count, table_at, entry, place):
    """Look up unsigned indices of `place` bytes in a table of entries of `entry` bytes."""
    if place == 2:
        _copy(bytes_(out_at), halves(places_at), start, count, bytes_(table_at))
    elif entry == 1:
        _copy(bytes_(out_at), bytes_(places_at), start, count, bytes_(table_at))
    elif entry == 2:
        _copy(halves(out_at), bytes_(places_at), start, count, halves(table_at))
    elif entry == 4:
        _copy(words(out_at), bytes_(places_at), start, count, words(table_at))
    else:
        _copy(wide_words(out_at), bytes_(places_at), start, count, wide_words(table_at))


@part
def _copy(out, places, start, count, table):
    for i in range(start, start + count):
        out[i] = table[places[i]]
