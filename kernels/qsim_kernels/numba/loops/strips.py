"""Rounding of a strip: up to `STRIP` consecutive elements, given and returned as float32 patterns that stay in the nearest cache.

There is a loop for each variant of `arithmetic.rounding`, made when it is asked for. Two loops are faster ways to the same results, in
which the processor's floats round.

Every loop takes the same arguments:
    out_at: Address of the results, which do not overlap the values.
    x_at: Address of the values.
    count: Number of elements.
    grid_at: Address of a `GridNumbers` and a `UsedBits`, and whether 16 random bits are enough.
    seed: 64 bits.
    stream: Which of the seed's streams of random bits to use.
    first: Logical index of the first element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.numba.jobs import FEW_STEPS
from qsim_kernels.numba.loops.bits import address_of, as_float, as_int, halves, ints, last_of, longs, numbers, part, room_for_words
from qsim_kernels.numba.loops.roundings import SERVED, draw, draw_first, functions, single_at
from qsim_kernels.numbers.carrier import SINGLE, SYMMETRIC, Variant, read_variant
from qsim_kernels.numbers.grid import Mode

STRIP = 512

#: Blocks of random bits of a strip that begins within one, their elements, and their words.
_BLOCKS = STRIP // SERVED + 1
_DRAWN, _WORDS = _BLOCKS * SERVED, _BLOCKS * SERVED // 2
_MANTISSA, _INFINITY, _NAN, _BIAS = SINGLE.mantissa, SINGLE.infinity, SINGLE.nan, SINGLE.bias
_i32: Any = np.int32
_f32: Any = np.float32
_u32: Any = np.uint32
_u64: Any = np.uint64


def __getattr__(name: str) -> Any:
    """The loop of a variant."""
    variant = read_variant(name.removeprefix("approximately_"))
    if name.startswith("approximately_"):
        return _approximated(variant)
    if variant.mode == Mode.STOCHASTIC:
        return _stochastic(variant)
    return _looked_up(variant) if 0 < variant.table <= FEW_STEPS else _deterministic(variant)


def nearest_by_addition(out_at, x_at, count, grid_at, seed, stream, first):
    """Round to nearest by adding and subtracting a power of two, where `torch.rounding` does so."""
    out, x, n = ints(out_at), ints(x_at), longs(grid_at)
    steps, lowest, top = _i32(n[0] << _MANTISSA), _i32(n[1] << _MANTISSA), _i32(n[5])
    for i in range(count):
        pattern = x[i]
        magnitude = _i32(pattern & _NAN)
        within = min(magnitude, top)
        power = as_float(_i32(max(_i32(within & _INFINITY), lowest) + steps))
        rounded = as_int(_f32(_f32(as_float(within) + power) - power))
        out[i] = _i32(_NAN) if magnitude > _INFINITY else _i32(rounded | _i32(pattern & ~_NAN))


def _deterministic(variant: Variant) -> Any:
    round_bits = functions(SINGLE, variant).round_bits

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        (grid, _), out, x = single_at(grid_at), ints(out_at), ints(x_at)
        for i in range(count):
            out[i] = round_bits(x[i], _u32(0), grid, 0)

    return loop


def _looked_up(variant: Variant) -> Any:
    """A loop that compares with every place of a small table: many times as fast as bisection, whose loads vectors lack."""
    size = 1 << variant.table
    row = 8 * size

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        (grid, _), out, x = single_at(grid_at), ints(out_at), ints(x_at)
        firsts, results = numbers(grid.table, size), numbers(grid.table + row, size)
        for i in range(count):
            pattern = x[i]
            found = last_of(_i32(pattern ^ _i32(_i32(pattern >> 31) & _NAN)), firsts, results)
            out[i] = _i32(_NAN) if _i32(pattern & _NAN) > _INFINITY else found

    return loop


def _approximated(variant: Variant) -> Any:
    """A loop that computes positions between two values of a small table in float32, whose error rarely matters.

    In steps of 2**-16 of the way, it is less than 2**-6. A strip in which one decides is rounded again, exactly.
    """
    size, with_all_bits = 1 << variant.table, _with_all_bits(variant)
    row, error = 8 * size, _f32(2**-6)
    lowest, least, end = _f32(65535 - error), _f32(65535.5), _f32(65536 + error)

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        (grid, used), out, x = single_at(grid_at), ints(out_at), ints(x_at)
        firsts, nears = numbers(grid.table, size), numbers(grid.table + row, size)
        fars = numbers(grid.table + 2 * row, size)
        early = room_for_words(_WORDS)
        drawn, mask = _first_bits(early, count, seed, stream, first), _i32(used.keep >> _u32(16))
        open_ = _i32(0)
        for i in range(count):
            pattern = x[i]
            key = _i32(pattern ^ _i32(_i32(pattern >> 31) & _NAN))
            near, far = last_of(key, firsts, nears), last_of(key, firsts, fars)
            start = as_float(near)
            share = _f32(_f32(as_float(pattern) - start) / _f32(as_float(far) - start))
            # Comparisons that NaN fails: of equal neighbours, either is right.
            share = share if share > _f32(0) else _f32(0)
            share = share if share < _f32(1) else _f32(1)
            place = _f32(_f32(share * _f32(65536)) + _f32(_i32(_i32(drawn[i]) & mask)))
            open_ = _i32(open_ | _i32((place > lowest) & (place < end)))
            found = far if place > least else near
            out[i] = _i32(_NAN) if _i32(pattern & _NAN) > _INFINITY else found
        if open_ != 0:
            with_all_bits(out, x, count, grid, used, seed, stream, first)

    return loop


def _stochastic(variant: Variant) -> Any:
    """A loop that draws the last 16 bits of a strip only where they might matter, for zeros and ones give different results."""
    round_bits, random_bits = functions(SINGLE, variant).round_bits, functions(SINGLE, variant).random_bits
    with_all_bits = _with_all_bits(variant)

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        (grid, used), out, x = single_at(grid_at), ints(out_at), ints(x_at)
        early, is_enough = room_for_words(_WORDS), longs(grid_at)[13] != 0
        drawn = _first_bits(early, count, seed, stream, first)
        differing = _i32(0)
        for i in range(count):
            bits = _u32(_u32(drawn[i]) << _u32(16))
            least = round_bits(x[i], random_bits(bits, used), grid, 0)
            if not is_enough:
                most = round_bits(x[i], random_bits(_u32(bits | _u32(0xFFFF)), used), grid, 0)
                differing = _i32(differing | _i32(least ^ most))
            out[i] = least
        if differing != 0:
            with_all_bits(out, x, count, grid, used, seed, stream, first)

    return loop


@part
def _first_bits(early, count, seed, stream, first):
    """Draw the first 16 bits of the elements of a strip, into room for their words."""
    draw_first(early, _blocks(count, first), _u64(first // SERVED), _u64(seed), _u64(stream))
    return halves(address_of(early) + 2 * (first % SERVED))


@part
def _blocks(count, first):
    """The number of blocks of random bits that elements take part in."""
    return (first % SERVED + count + SERVED - 1) // SERVED


def _with_all_bits(variant: Variant) -> Any:
    round_bits, random_bits = functions(SINGLE, variant).round_bits, functions(SINGLE, variant).random_bits

    @part
    def with_all_bits(out, x, count, grid, used, seed, stream, first):
        drawn, lead = room_for_words(_DRAWN), first % SERVED
        draw(drawn, _blocks(count, first), _u64(first // SERVED), _u64(seed), _u64(stream))
        for i in range(count):
            out[i] = round_bits(x[i], random_bits(drawn[lead + i], used), grid, 0)

    return with_all_bits


_with_all_bits_by_steps = _with_all_bits(SYMMETRIC)


def stochastic_by_steps(out_at, x_at, count, grid_at, seed, stream, first):
    """Round stochastically where values are evenly spaced down to zero: add random bits to distances in steps of 2**-16 of the spacing.

    It takes half of the general loop's time, which rounds twice to learn whether the last 16 bits matter.
    """
    (grid, used), out, x = single_at(grid_at), ints(out_at), ints(x_at)
    early = room_for_words(_WORDS)
    drawn = _first_bits(early, count, seed, stream, first)
    mantissa, mask = _i32(_i32(_MANTISSA) - grid.shift), _i32(used.keep >> _u32(16))
    lowest, down, up = _i32(grid.low << 23), _i32(mantissa << 23), _i32(_i32(_i32(2 * _BIAS + 16) + mantissa) << 23)
    open_ = _i32(0)
    for i in range(count):
        pattern = x[i]
        magnitude = _i32(pattern & _NAN)
        within = min(magnitude, grid.top)
        binade = max(_i32(within & _INFINITY), lowest)
        position = _i32(_i32(_f32(as_float(within) * as_float(_i32(up - binade)))) + _i32(_i32(drawn[i]) & mask))
        # Later bits, of the element and of its noise, could carry through 16 ones only.
        open_ = _i32(open_ | _i32(_i32(_i32(position + 1) & 0xFFFF) == 0))
        rounded = as_int(_f32(_f32(_i32(position >> 16)) * as_float(_i32(binade - down))))
        out[i] = _i32(_NAN) if magnitude > _INFINITY else _i32(rounded | _i32(pattern & ~_NAN))
    if open_ != 0:
        _with_all_bits_by_steps(out, x, count, grid, used, seed, stream, first)
