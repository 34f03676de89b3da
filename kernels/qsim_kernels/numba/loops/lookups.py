"""Rounding of a strip onto a table; see `loops.strips` for the arguments.

Few places are compared with all of them, in vectors. Among more, the leading bits of a number are looked up first: they leave a few places,
for tables of 256 values one or two. Where the results are drawn, positions between two values are computed in float32.
"""

from __future__ import annotations

from typing import Any

from qsim_kernels.numba.jobs import STRIP
from qsim_kernels.numba.loops.bits import (
    as_float,
    as_int,
    f32,
    i32,
    ints,
    last_of,
    numbers,
    part,
    room_for_ints,
    room_for_words,
    u32,
)
from qsim_kernels.numba.loops.roundings import single_at, strip_at
from qsim_kernels.numba.loops.strips import WORDS, first_bits, with_all_bits
from qsim_kernels.numbers.buckets import HEADER, UNFIT
from qsim_kernels.numbers.carrier import SINGLE, Variant, read_variant
from qsim_kernels.numbers.grid import Mode

_INFINITY, _NAN = SINGLE.infinity, SINGLE.nan


def __getattr__(name: str) -> Any:
    """The loop of a variant: `compared_`, or `bisected_` and the steps among the places that leading bits leave."""
    way, _, start = name.partition("rounding_")
    variant, (kind, _, steps) = read_variant(f"rounding_{start}"), way.rstrip("_").partition("_")
    if kind not in ("compared", "bisected"):
        raise AttributeError(f"no loop has the name {name!r}")
    places = _compared(variant) if kind == "compared" else _bisected(int(steps), variant.mode == Mode.STOCHASTIC)
    return _stochastic(variant, places) if variant.mode == Mode.STOCHASTIC else _deterministic(places)


@part
def _key(pattern):
    """The bits of a number in the order of numbers."""
    return i32(pattern ^ i32(i32(pattern >> 31) & _NAN))


def _compared(variant: Variant) -> Any:
    """A function that finds the results of a strip: it compares with every place, many times as fast as bisection, which vectors lack."""
    size, is_drawn = 1 << variant.table, variant.mode == Mode.STOCHASTIC
    row = 8 * size

    @part
    def compared(near, far, inverse, x, count, grid_at):
        grid, _ = single_at(grid_at)
        firsts, nears = numbers(grid.table, size), numbers(grid.table + row, size)
        fars = numbers(grid.table + 2 * row, size)
        for i in range(count):
            key = _key(x[i])
            near[i] = last_of(key, firsts, nears)
            if is_drawn:
                far[i] = last_of(key, firsts, fars)
                inverse[i] = as_int(f32(f32(1) / f32(as_float(far[i]) - as_float(near[i]))))
        return 0

    return compared


def _bisected(steps: int, is_drawn: bool) -> Any:
    """A function that finds the results of a strip from the leading bits of numbers, and a few steps of bisection."""

    @part
    def bisected(near, far, inverse, x, count, grid_at):
        memory = ints(strip_at(grid_at).buckets)
        width, buckets, size = memory[0], memory[1], memory[2]
        firsts, nears = HEADER + buckets, HEADER + buckets + size
        fars, inverses, middle = nears + size, nears + 2 * size, HEADER + (buckets >> 1)
        for i in range(count):
            key = _key(x[i])
            place = memory[middle + (key >> width)]
            for step in range(steps):
                reach = 1 << (steps - 1 - step)
                place += reach * (key >= memory[firsts + place + reach])
            near[i] = place
        if is_drawn:
            for i in range(count):
                far[i] = memory[fars + near[i]]
            for i in range(count):
                inverse[i] = memory[inverses + near[i]]
        for i in range(count):
            near[i] = memory[nears + near[i]]
        open_ = i32(0)
        if is_drawn:
            for i in range(count):
                open_ = i32(open_ | i32((inverse[i] == UNFIT) & (i32(i32(x[i] ^ near[i]) << 1) != 0)))
        return open_

    return bisected


def _deterministic(places: Any) -> Any:
    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        out, x = ints(out_at), ints(x_at)
        places(out, out, out, x, count, grid_at)
        for i in range(count):
            if i32(x[i] & _NAN) > _INFINITY:
                out[i] = _NAN

    return loop


def _stochastic(variant: Variant, places: Any) -> Any:
    """A loop that computes positions between two values in float32, whose error rarely matters.

    In steps of 2**-16 of the way, it is less than 2**-6. A strip in which one decides is rounded again, exactly.
    """
    exactly, error = with_all_bits(variant), f32(2**-6)
    lowest, least, end = f32(65535 - error), f32(65535.5), f32(65536 + error)

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        (grid, used), out, x = single_at(grid_at), ints(out_at), ints(x_at)
        near, far, inverse, early = room_for_ints(STRIP), room_for_ints(STRIP), room_for_ints(STRIP), room_for_words(WORDS)
        drawn, mask = first_bits(early, count, seed, stream, first), i32(used.keep >> u32(16))
        open_ = i32(places(near, far, inverse, x, count, grid_at))
        for i in range(count):
            pattern = x[i]
            share = f32(f32(as_float(pattern) - as_float(near[i])) * as_float(inverse[i]))
            # Comparisons that NaN fails: of equal neighbours, either is right.
            share = share if share > f32(0) else f32(0)
            share = share if share < f32(1) else f32(1)
            place = f32(f32(share * f32(65536)) + f32(i32(i32(drawn[i]) & mask)))
            open_ = i32(open_ | i32((place > lowest) & (place < end)))
            out[i] = i32(_NAN) if i32(pattern & _NAN) > _INFINITY else far[i] if place > least else near[i]
        if open_ != 0:
            exactly(out, x, count, grid, used, seed, stream, first)

    return loop
