"""Rounding of a strip: up to `STRIP` consecutive elements, given and returned as float32 patterns that stay in the nearest cache.

There are four loops. The fastest two round to nearest: one adds and subtracts a power of two, one adds to patterns. Any rounding without
random bits is the third: its mode is a few masks and limits. The fourth rounds stochastically, in three ways. In general, an element goes
through the steps of `qsim_kernels.reference.rounding` with all its random bits. Most formats are symmetric and saturate, and the first 16
bits decide: they are added to a pattern where at most 16 bits are rounded away, and to an element's distance from zero in steps of 2**-16
of the spacing around it where the values are evenly spaced down to zero.

Every loop takes the same arguments:
    out_at: Address of the results, which do not overlap the values.
    x_at: Address of the values.
    count: Number of elements.
    how_at: Address of `compiled.rounding.Numbers`.
    seed: 64 bits.
    stream: Which of the seed's streams of random bits to use.
    first: Logical index of the first element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.carrier import NOISE_BITS, SINGLE
from qsim_kernels.compiled.loops.bits import (
    address_of,
    as_float,
    as_int,
    halves,
    inlined,
    ints,
    longs,
    part,
    room_for_wide_words,
    room_for_words,
)
from qsim_kernels.compiled.loops.elements import limited, shift_of, with_sign
from qsim_kernels.compiled.loops.noise import SERVED, draw, draw_first

STRIP = 512
#: Ways of rounding stochastically.
IN_GENERAL, BY_ADDITION, BY_STEPS = 0, 1, 2

#: Blocks of random bits of a strip that begins within one, their elements, and their words.
_BLOCKS = STRIP // SERVED + 1
_DRAWN, _WORDS = _BLOCKS * SERVED, _BLOCKS * SERVED // 2
_NOISE, _MANTISSA, _INFINITY, _NAN, _BIAS = NOISE_BITS, SINGLE.mantissa, SINGLE.infinity, SINGLE.nan, SINGLE.bias
#: Random bits in a half word.
_HALF = 16
_i32: Any = np.int32
_f32: Any = np.float32
_u64: Any = np.uint64


def nearest(out_at, x_at, count, how_at, seed, stream, first):
    """Round to nearest by adding and subtracting a power of two, where `reference.rounding` does so."""
    out, x, how = ints(out_at), ints(x_at), longs(how_at)
    steps, lowest, top = _i32(how[0] << _MANTISSA), _i32(how[1] << _MANTISSA), _i32(how[3])
    for i in range(count):
        pattern = x[i]
        magnitude = _i32(pattern & _NAN)
        within = min(magnitude, top)
        power = as_float(_i32(max(_i32(within & _INFINITY), lowest) + steps))
        out[i] = with_sign(as_int(_f32(_f32(as_float(within) + power) - power)), pattern, magnitude)


def nearest_spaced(out_at, x_at, count, how_at, seed, stream, first):
    """Round to nearest where the same number of bits of every pattern is rounded away, and nothing has to be limited afterwards."""
    out, x, how = ints(out_at), ints(x_at), longs(how_at)
    shift, parity, limit = _i32(how[0] & 31), _i32(how[14]), _i32(how[3]) if how[11] else _i32(_INFINITY)
    ones = _i32(~_i32(_i32(-1) << shift))
    one = _i32(ones & 1)
    for i in range(count):
        pattern = x[i]
        magnitude = _i32(pattern & _NAN)
        within = min(magnitude, limit)
        last = _i32(_i32(_i32(within ^ parity) >> shift) & one)
        out[i] = with_sign(_i32(_i32(within + _i32(last + _i32(ones >> 1))) & _i32(~ones)), pattern, magnitude)


def deterministic(out_at, x_at, count, how_at, seed, stream, first):
    """Round without random bits onto any grid in float32's bits."""
    out, x, how = ints(out_at), ints(x_at), longs(how_at)
    shift0, low, least = _i32(how[0]), _i32(how[1]), _i32(how[2])
    ends = _i32(how[3]), _i32(how[4]), _i32(how[5]), _i32(how[6]), _i32(how[7])
    is_signed, has_negative_zero, saturates = how[8] != 0, how[9] != 0, how[11] != 0
    parity, half, even, odd = _i32(how[14]), _i32(how[15]), _i32(how[16]), _i32(how[17])
    ones_above, ones_below, one_above, one_below = _i32(how[18]), _i32(how[19]), _i32(how[20]), _i32(how[21])
    limit_above, limit_below, inward_above, inward_below = _i32(how[22]), _i32(how[23]), _i32(how[24]), _i32(how[25])
    for i in range(count):
        pattern = x[i]
        magnitude = _i32(pattern & _NAN)
        is_negative = pattern < 0
        # A NaN is treated as infinity until the end, so that nothing overflows.
        within = min(magnitude, _i32(_INFINITY))
        shift = shift_of(within, shift0, low)
        ones = _i32(~_i32(_i32(-1) << shift))
        one = _i32(ones & 1)
        last = _i32(_i32(_i32(within ^ parity) >> shift) & one)
        masked = _i32((ones_below if is_negative else ones_above) | _i32(odd & _i32(last - 1)))
        added = _i32(_i32(_i32(ones >> 1) & half) + _i32(ones & masked))
        added = _i32(added + _i32(_i32(last & even) + _i32(one & (one_below if is_negative else one_above))))
        rounded = _i32(_i32(within + added) & _i32(~ones))
        leaves = within > (limit_below if is_negative else limit_above)
        rounded = rounded if within >= least else least if leaves else _i32(0)
        stays = (inward_below if is_negative else inward_above) != 0 and magnitude < _INFINITY
        out[i] = limited(rounded, pattern, magnitude, ends, is_signed, has_negative_zero, saturates or stays)


def stochastic(out_at, x_at, count, how_at, seed, stream, first):
    """Round stochastically.

    The first 16 random bits of an element nearly always decide. Where they might not, all elements of the strip are rounded again with all
    their bits.
    """
    out, x, how = ints(out_at), ints(x_at), longs(how_at)
    lead, block, way = first % SERVED, _u64(first // SERVED), how[26]
    blocks = (lead + count + SERVED - 1) // SERVED
    if way != IN_GENERAL:
        words = room_for_words(_WORDS)
        draw_first(words, blocks, block, _u64(seed), _u64(stream))
        drawn = halves(address_of(words) + 2 * lead)
        if way == BY_ADDITION:
            _by_addition(out, x, count, how, drawn)
            return
        if _by_steps(out, x, count, how, drawn):
            return
    noise = room_for_wide_words(_DRAWN)
    draw(noise, blocks, block, _u64(seed), _u64(stream), how[12], how[13] != 0)
    _in_general(out, x, count, how, noise, lead)


@part
def _by_addition(out, x, count, how, drawn):
    """Round where at most 16 bits of every pattern are rounded away."""
    shift, limit, mask = _i32(how[0]), _i32(how[3]) if how[11] else _i32(_INFINITY), _used(how[12])
    kept, spare = _i32(_i32(-1) << shift), _i32(_HALF - shift)
    for i in range(count):
        pattern = x[i]
        magnitude = _i32(pattern & _NAN)
        noise = _i32(_i32(drawn[i]) & mask)
        rounded = _i32(_i32(min(magnitude, limit) + _i32(noise >> spare)) & kept)
        out[i] = with_sign(rounded, pattern, magnitude)


@part
def _by_steps(out, x, count, how, drawn):
    """Round where the values are evenly spaced down to zero.

    Returns:
        Whether the first 16 random bits decided every element.
    """
    mantissa, lowest, top, mask = _MANTISSA - how[0], _i32(how[1] << _MANTISSA), _i32(how[3]), _used(how[12])
    down, up = _i32(mantissa << _MANTISSA), _i32((2 * _BIAS + _HALF + mantissa) << _MANTISSA)
    open_ = _i32(0)
    for i in range(count):
        pattern = x[i]
        magnitude = _i32(pattern & _NAN)
        within = min(magnitude, top)
        binade = max(_i32(within & _INFINITY), lowest)
        position = _i32(_f32(as_float(within) * as_float(_i32(up - binade))))
        position = _i32(position + _i32(_i32(drawn[i]) & mask))
        # Later bits, of the element and of its noise, could carry through 16 ones only.
        open_ = _i32(open_ | _i32(_i32(_i32(position + 1) & 0xFFFF) == 0))
        rounded = as_int(_f32(_f32(_i32(position >> _HALF)) * as_float(_i32(binade - down))))
        out[i] = with_sign(rounded, pattern, magnitude)
    return open_ == 0


@part
def _in_general(out, x, count, how, noise, lead):
    """Round onto any grid in float32's bits, given the output of `noise.draw` from `lead` on."""
    shift0, low, least = _i32(how[0]), _i32(how[1]), _i32(how[2])
    ends = _i32(how[3]), _i32(how[4]), _i32(how[5]), _i32(how[6]), _i32(how[7])
    is_signed, has_negative_zero, has_zero, saturates = how[8] != 0, how[9] != 0, how[10] != 0, how[11] != 0
    for i in range(count):
        pattern, drawn = x[i], noise[lead + i]
        magnitude = _i32(pattern & _NAN)
        within = min(magnitude, _i32(_INFINITY))
        shift = shift_of(within, shift0, low)
        added = _i32(np.uint32(drawn >> _u64(_NOISE - _MANTISSA)) >> np.uint32(_MANTISSA - shift))
        rounded = _i32(_i32(within + added) & _i32(_i32(-1) << shift))
        if least and has_zero:
            leaves = magnitude > 0 and _leaves_zero(within, least, drawn)
            rounded = rounded if within >= least else least if leaves else _i32(0)
        elif least:
            rounded = max(rounded, least)
        out[i] = limited(rounded, pattern, magnitude, ends, is_signed, has_negative_zero, saturates)


@inlined
def _leaves_zero(within, least, drawn):
    """Whether a magnitude below the smallest value rounds to it, given its position between zero and it in units of 2**-_NOISE."""
    field, hidden = np.int64(within >> _MANTISSA), np.int64(1 << _MANTISSA)
    significand = np.int64(within) & (hidden - 1) | (hidden if field > 0 else np.int64(0))
    binades = max(np.int64(least >> _MANTISSA) - max(field, np.int64(1)), np.int64(0))
    position = significand << (_NOISE - _MANTISSA) >> min(binades, np.int64(63))
    return _u64(position) + drawn >= _u64(1 << _NOISE)


@inlined
def _used(bits):
    """The mask of the random bits in a half word that are used."""
    return _i32(_i32(0xFFFF) << max(_i32(_HALF) - _i32(bits), _i32(0)) & 0xFFFF)
