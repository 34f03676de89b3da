"""Rounding of a strip: up to `STRIP` consecutive elements, given and returned as float32 patterns that stay in the nearest cache.

There is a loop for each variant of `arithmetic.rounding`, made when it is asked for, and one that rounds to nearest by additions.

Every loop takes the same arguments:
    out_at: Address of the results, which do not overlap the values.
    x_at: Address of the values.
    count: Number of elements.
    grid_at: Address of an `OntoGrid`, and whether 16 random bits are enough.
    seed: 64 bits.
    stream: Which of the seed's streams of random bits to use.
    first: Logical index of the first element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.carrier import SINGLE, Variant, read_variant
from qsim_kernels.compiled.loops.bits import address_of, as_float, as_int, halves, ints, longs, room_for_words
from qsim_kernels.compiled.loops.noise import SERVED, draw, draw_first
from qsim_kernels.compiled.loops.roundings import in_singles, single_at
from qsim_kernels.grid import Mode

STRIP = 512

#: Blocks of random bits of a strip that begins within one, their elements, and their words.
_BLOCKS = STRIP // SERVED + 1
_DRAWN, _WORDS = _BLOCKS * SERVED, _BLOCKS * SERVED // 2
_MANTISSA, _INFINITY, _NAN = SINGLE.mantissa, SINGLE.infinity, SINGLE.nan
_i32: Any = np.int32
_f32: Any = np.float32
_u32: Any = np.uint32
_u64: Any = np.uint64


def __getattr__(name: str) -> Any:
    """The loop of a variant."""
    variant = read_variant(name)
    return _stochastic(variant) if variant.mode == Mode.STOCHASTIC else _deterministic(variant)


def nearest_by_addition(out_at, x_at, count, grid_at, seed, stream, first):
    """Round to nearest by adding and subtracting a power of two, where `reference.rounding` does so."""
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
    round_bits = in_singles(variant).round_bits

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        out, x, grid = ints(out_at), ints(x_at), single_at(grid_at)
        for i in range(count):
            out[i] = round_bits(x[i], _u32(0), grid, 0)

    return loop


def _stochastic(variant: Variant) -> Any:
    """A loop that draws the last 16 bits of a strip only where they might matter, for zeros and ones give different results."""
    round_bits, random_bits = in_singles(variant).round_bits, in_singles(variant).random_bits

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        out, x, grid, is_enough = ints(out_at), ints(x_at), single_at(grid_at), longs(grid_at)[12] != 0
        lead, block = first % SERVED, _u64(first // SERVED)
        blocks = (lead + count + SERVED - 1) // SERVED
        words = room_for_words(_WORDS)
        draw_first(words, blocks, block, _u64(seed), _u64(stream))
        early = halves(address_of(words) + 2 * lead)
        if is_enough:
            for i in range(count):
                out[i] = round_bits(x[i], random_bits(_u32(_u32(early[i]) << _u32(16)), grid), grid, 0)
            return
        differing = _i32(0)
        for i in range(count):
            bits = _u32(_u32(early[i]) << _u32(16))
            least = round_bits(x[i], random_bits(bits, grid), grid, 0)
            most = round_bits(x[i], random_bits(_u32(bits | _u32(0xFFFF)), grid), grid, 0)
            differing = _i32(differing | _i32(least ^ most))
            out[i] = least
        if differing != 0:
            drawn = room_for_words(_DRAWN)
            draw(drawn, blocks, block, _u64(seed), _u64(stream))
            for i in range(count):
                out[i] = round_bits(x[i], random_bits(drawn[lead + i], grid), grid, 0)

    return loop
