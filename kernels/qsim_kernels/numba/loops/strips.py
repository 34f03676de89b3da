"""Rounding of a strip: up to `STRIP` consecutive elements, given and returned as float32 patterns that stay in the nearest cache.

There is a loop for each variant of `arithmetic.rounding`, made when it is asked for. Two are faster ways to the same results, in which the
processor's floats round; those of tables are in `loops.lookups`.

Every loop takes the same arguments:
    out_at: Address of the results, which do not overlap the values.
    x_at: Address of the values.
    count: Number of elements.
    grid_at: Address of a `StripNumbers`.
    seed: 64 bits.
    stream: Which of the seed's streams of random bits to use.
    first: Logical index of the first element.
"""

from __future__ import annotations

from typing import Any

from qsim_kernels.arithmetic.philox import SHARED
from qsim_kernels.numba.jobs import IN_FLOATS, STRIP
from qsim_kernels.numba.loops.bits import (
    address_of,
    as_float,
    as_int,
    f32,
    halves,
    i32,
    inlined,
    ints,
    part,
    room_for_words,
    u32,
    u64,
)
from qsim_kernels.numba.loops.roundings import draw, draw_first, functions, single_at, strip_at
from qsim_kernels.numbers.carrier import SINGLE, Variant, read_variant
from qsim_kernels.numbers.grid import Mode, Overflow

#: Blocks of random bits of a strip that begins within one, their elements, and their words.
_BLOCKS = STRIP // SHARED + 1
_DRAWN = _BLOCKS * SHARED
WORDS = _DRAWN // 2
_MANTISSA, _INFINITY, _NAN, _BIAS = SINGLE.mantissa, SINGLE.infinity, SINGLE.nan, SINGLE.bias


def __getattr__(name: str) -> Any:
    """The loop of a variant."""
    way, _, start = name.partition("rounding_")
    variant = read_variant(f"rounding_{start}" if way in ("", IN_FLOATS) else name)
    if way == IN_FLOATS:
        return _stochastic_by_steps(variant) if variant.mode == Mode.STOCHASTIC else _nearest_by_addition(variant)
    return _stochastic(variant) if variant.mode == Mode.STOCHASTIC else _deterministic(variant)


def _signed(variant: Variant) -> Any:
    """A function that gives a rounded magnitude the sign of a pattern."""

    @inlined
    def with_sign(rounded, pattern):
        return i32(rounded | i32(pattern & ~_NAN))

    @inlined
    def without_negative_zero(rounded, pattern):
        # The negative of a magnitude other than zero has the sign bit.
        return i32(rounded | i32(i32(pattern & ~_NAN) & i32(-rounded)))

    @inlined
    def without_negatives(rounded, pattern):
        return i32(rounded & ~i32(pattern >> 31))

    if not variant.signed:
        return without_negatives
    return with_sign if variant.keep_sign else without_negative_zero


def _limits(variant: Variant) -> tuple[Any, Any]:
    """Functions for ways in floats: one that gives `GridBits.limit`, and one that finishes a rounded magnitude of at most that."""
    signed = _signed(variant)

    @inlined
    def largest(top, shift):
        return top

    @inlined
    def saturated(rounded, magnitude, pattern, top, over):
        return i32(_NAN) if magnitude > _INFINITY else signed(rounded, pattern)

    @inlined
    def next_one(top, shift):
        return i32(top + i32(1 << shift))

    @inlined
    def overflowing(rounded, magnitude, pattern, top, over):
        result = over if rounded > top else rounded
        return i32(_NAN) if max(magnitude, result) > _INFINITY else signed(result, pattern)

    return (next_one, overflowing) if variant.overflow == Overflow.NONFINITE else (largest, saturated)


def _nearest_by_addition(variant: Variant) -> Any:
    """A loop that rounds to nearest by adding and subtracting a power of two, as `torch.rounding` does."""
    limit, finished = _limits(variant)

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        (grid, _), out, x = single_at(grid_at), ints(out_at), ints(x_at)
        steps, lowest, most = i32(grid.shift << _MANTISSA), i32(grid.low << _MANTISSA), limit(grid.top, grid.shift)
        for i in range(count):
            pattern = x[i]
            magnitude = i32(pattern & _NAN)
            within = min(magnitude, most)
            power = as_float(i32(max(i32(within & _INFINITY), lowest) + steps))
            rounded = as_int(f32(f32(as_float(within) + power) - power))
            out[i] = finished(rounded, magnitude, pattern, grid.top, grid.over)

    return loop


def _deterministic(variant: Variant) -> Any:
    round_bits = functions(SINGLE, variant).round_bits

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        (grid, _), out, x = single_at(grid_at), ints(out_at), ints(x_at)
        for i in range(count):
            out[i] = round_bits(x[i], u32(0), grid, 0)

    return loop


def _stochastic(variant: Variant) -> Any:
    """A loop that draws the last 16 bits of a strip only where they might matter, for zeros and ones give different results."""
    round_bits, random_bits = functions(SINGLE, variant).round_bits, functions(SINGLE, variant).random_bits
    exactly = with_all_bits(variant)

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        strip, out, x = strip_at(grid_at), ints(out_at), ints(x_at)
        (grid, used), early = strip.rounding, room_for_words(WORDS)
        drawn = first_bits(early, count, seed, stream, first)
        differing = i32(0)
        for i in range(count):
            bits = u32(u32(drawn[i]) << u32(16))
            least = round_bits(x[i], random_bits(bits, used), grid, 0)
            if not strip.is_short:
                most = round_bits(x[i], random_bits(u32(bits | u32(0xFFFF)), used), grid, 0)
                differing = i32(differing | i32(least ^ most))
            out[i] = least
        if differing != 0:
            exactly(out, x, count, grid, used, seed, stream, first)

    return loop


@part
def first_bits(early, count, seed, stream, first):
    """Draw the first 16 bits of the elements of a strip, into room for their words."""
    draw_first(early, _blocks(count, first), u64(first // SHARED), u64(seed), u64(stream))
    return halves(address_of(early) + 2 * (first % SHARED))


@part
def _blocks(count, first):
    """The number of blocks of random bits that elements take part in."""
    return (first % SHARED + count + SHARED - 1) // SHARED


def with_all_bits(variant: Variant) -> Any:
    """A function that rounds a strip with all of its random bits."""
    round_bits, random_bits = functions(SINGLE, variant).round_bits, functions(SINGLE, variant).random_bits

    @part
    def exactly(out, x, count, grid, used, seed, stream, first):
        drawn, lead = room_for_words(_DRAWN), first % SHARED
        draw(drawn, _blocks(count, first), u64(first // SHARED), u64(seed), u64(stream))
        for i in range(count):
            out[i] = round_bits(x[i], random_bits(drawn[lead + i], used), grid, 0)

    return exactly


def _stochastic_by_steps(variant: Variant) -> Any:
    """A loop for values that are evenly spaced down to zero: it adds random bits to distances in steps of 2**-16 of the spacing.

    It takes half of the general loop's time, which rounds twice to learn whether the last 16 bits matter.
    """
    (limit, finished), exactly = _limits(variant), with_all_bits(variant)

    def loop(out_at, x_at, count, grid_at, seed, stream, first):
        (grid, used), out, x = single_at(grid_at), ints(out_at), ints(x_at)
        early = room_for_words(WORDS)
        drawn = first_bits(early, count, seed, stream, first)
        mantissa, mask = i32(i32(_MANTISSA) - grid.shift), i32(used.keep >> u32(16))
        lowest, down, up = i32(grid.low << 23), i32(mantissa << 23), i32(i32(i32(2 * _BIAS + 16) + mantissa) << 23)
        open_, most = i32(0), limit(grid.top, grid.shift)
        for i in range(count):
            pattern = x[i]
            magnitude = i32(pattern & _NAN)
            within = min(magnitude, most)
            binade = max(i32(within & _INFINITY), lowest)
            position = i32(i32(f32(as_float(within) * as_float(i32(up - binade)))) + i32(i32(drawn[i]) & mask))
            # Later bits, of the element and of its noise, could carry through 16 ones only.
            open_ = i32(open_ | i32(i32(i32(position + 1) & 0xFFFF) == 0))
            rounded = as_int(f32(f32(i32(position >> 16)) * as_float(i32(binade - down))))
            out[i] = finished(rounded, magnitude, pattern, grid.top, grid.over)
        if open_ != 0:
            exactly(out, x, count, grid, used, seed, stream, first)

    return loop
