"""Rounding onto a grid inside a kernel.

`round_bits` is the way of the reference, for every grid and mode. `round_single` is the fast way for the grids that most formats have: it
lets float32's own addition find the neighbour.
"""

import triton
import triton.language as tl

from qsim_kernels.grid import Mode

NEAREST: tl.constexpr = tl.constexpr(int(Mode.NEAREST))
NEAREST_AWAY: tl.constexpr = tl.constexpr(int(Mode.NEAREST_AWAY))
NEAREST_UP: tl.constexpr = tl.constexpr(int(Mode.NEAREST_UP))
TOWARD_ZERO: tl.constexpr = tl.constexpr(int(Mode.TOWARD_ZERO))
UP: tl.constexpr = tl.constexpr(int(Mode.UP))
DOWN: tl.constexpr = tl.constexpr(int(Mode.DOWN))
ODD: tl.constexpr = tl.constexpr(int(Mode.ODD))
STOCHASTIC: tl.constexpr = tl.constexpr(int(Mode.STOCHASTIC))

MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
SIGN: tl.constexpr = tl.constexpr(-(2**31))
NAN: tl.constexpr = tl.constexpr(0x7FFFFFFF)

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def add_toward_zero(a, b):
    """The sum of two positive float32 blocks, rounded toward zero: one instruction, which Triton's language and interpreter have not."""
    if INTERPRETED:
        total = a + b
        second = total - a
        error = (a - (total - second)) + (b - second)
        return (total.to(tl.int32, bitcast=True) - (error < 0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        return tl.inline_asm_elementwise("add.rz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def round_single(
    x, noise, lowest, lift, parity, top, bottom,
    MODE: tl.constexpr, HALVES: tl.constexpr, BINARY: tl.constexpr, SYMMETRIC: tl.constexpr, KEEP_SIGN: tl.constexpr,
    FIX_NAN: tl.constexpr,
):  # fmt: skip
    """Rounds float32 values, saturating, onto a grid with evenly spaced values around zero.

    Next to a large enough power of two float32's spacing is the grid's spacing at `x`. To add that power and take it away again leaves `x`
    rounded onto the grid, in the way that the addition rounds.

    Args:
        x: Values.
        noise: Random integers of 16 bits, if `HALVES`, or 32.
        lowest: The bits of the grid's smallest normal value.
        lift: What to add to the bits of a binade's power of two to get the power of two that is added.
        parity: What makes the last bit of the exponent field of the power added the inverse of the last bit of the grid's code.
        top: The largest value.
        bottom: The smallest value.
        MODE: `NEAREST`, `TOWARD_ZERO`, `UP`, `DOWN` or `STOCHASTIC`.
        HALVES: Width of the random integers.
        BINARY: Whether the grid holds powers of two alone.
        SYMMETRIC: Whether `bottom` is `-top`.
        KEEP_SIGN: Whether zero keeps its sign.
        FIX_NAN: Whether every NaN must come out the same; otherwise it is some NaN.

    Returns:
        Bits of the rounded values.
    """
    if SYMMETRIC:
        y = tl.minimum(tl.abs(x), top, propagate_nan=tl.PropagateNan.ALL)
    else:
        x = tl.maximum(x, bottom, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, top, propagate_nan=tl.PropagateNan.ALL)
        y = tl.abs(x)
    bits = x.to(tl.int32, bitcast=True)
    power = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, lowest) + lift
    if MODE == NEAREST:
        if BINARY:
            # Between two powers of two the last bit of the sum is always odd: make it the last bit of the grid's code.
            power |= ((power >> 23) + parity) & 1
        magic = power.to(tl.float32, bitcast=True)
        rounded = (y + magic) - magic
    elif MODE == STOCHASTIC:
        magic = power.to(tl.float32, bitcast=True)
        if HALVES:
            # R in units of 2**-16 of the spacing: sums rounded toward zero reach the upper neighbour just when R makes them.
            share = noise.to(tl.uint16).to(tl.float32) * (magic * 1.8189894035458565e-12)
            rounded = add_toward_zero(add_toward_zero(y, share), magic) - magic
        else:
            lower = add_toward_zero(y, magic) - magic
            # 2**32 / spacing: its exponent field is 55 + 2 * 127 less that of the power, modulo 2**32.
            inverse = (-1702887424 - power).to(tl.float32, bitcast=True)
            position = ((y - lower) * inverse).to(tl.uint32)
            rounded = tl.where(position + noise < position, lower + magic * 1.1920928955078125e-07, lower)
    else:
        magic = power.to(tl.float32, bitcast=True)
        rounded = add_toward_zero(y, magic) - magic
        if MODE != TOWARD_ZERO:
            away = (rounded < y) & ((bits >= 0) if MODE == UP else (bits < 0))
            rounded = tl.where(away, rounded + magic * 1.1920928955078125e-07, rounded)
    result = rounded.to(tl.int32, bitcast=True) | (bits & SIGN)
    if not KEEP_SIGN:
        result = (result.to(tl.float32, bitcast=True) + 0.0).to(tl.int32, bitcast=True)
    if FIX_NAN:
        result = tl.where(x == x, result, NAN)
    return result


@triton.jit
def round_bits(
    bits, noise, shift, low, least, half, parity, top, bottom, floor, over, under, scale,
    MODE: tl.constexpr, SATURATE: tl.constexpr, FLAT: tl.constexpr, SYMMETRIC: tl.constexpr, ZERO: tl.constexpr, SIGNED: tl.constexpr,
    KEEP_SIGN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rounds values given as bit patterns, onto any grid; the steps and names are those of `reference.rounding.round_bits`.

    Args:
        bits: int32 or, if `WIDE`, int64 patterns.
        noise: Random bits, in the top of 32; if `WIDE`, in the top of `NOISE_BITS` in an int64.
        scale: Takes a magnitude below the smallest value to its position between zero and it, in units of the noise.
        MODE: The rounding.
        SATURATE: Whether what overflows goes to the largest value.
        FLAT: Whether the number of rounded bits is the same for all values.
        SYMMETRIC: Whether the smallest value is the negative of the largest.
        ZERO: Whether zero is a value.
        SIGNED: Whether negative values exist.
        KEEP_SIGN: Whether zero keeps its sign.
        WIDE: Whether the carrier is float64.
    """
    MANTISSA: tl.constexpr = 52 if WIDE else 23
    INFINITY: tl.constexpr = 0x7FF0000000000000 if WIDE else 0x7F800000
    QUIET: tl.constexpr = 0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF
    MASK: tl.constexpr = 0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF
    magnitude = bits & MASK
    negative = bits < 0
    inexact = magnitude > 0
    is_nan = magnitude > INFINITY
    if FLAT:
        steps = shift
    else:
        steps = shift + tl.minimum(tl.maximum(low - (magnitude >> MANTISSA), 0), MANTISSA - shift)
    unit = (magnitude * 0 + 1) << steps
    ones = unit - 1
    if MODE == NEAREST:
        increment = (((magnitude + parity) >> steps) & ones & 1) + (ones >> 1)
        away = magnitude > half
    elif MODE == NEAREST_AWAY:
        increment = unit >> 1
        away = (magnitude >= half) & inexact
    elif MODE == NEAREST_UP:
        increment = tl.where(negative, ones, unit) >> 1
        away = (magnitude > half) | ((magnitude == half) & inexact & (bits > 0))
    elif MODE == TOWARD_ZERO:
        increment = magnitude * 0
        away = magnitude < 0
    elif MODE == UP:
        increment = tl.where(negative, 0, ones)
        away = bits > 0
    elif MODE == DOWN:
        increment = tl.where(negative, ones, 0)
        away = negative & inexact
    elif MODE == ODD:
        increment = ((((magnitude + parity) >> steps) & 1) ^ 1) * ones
        away = inexact
    elif WIDE:
        increment = (noise << 19) >> (52 - steps)
        position = (tl.minimum(magnitude, least).to(tl.float64, bitcast=True) * scale).to(tl.int64)
        away = position + noise >= 8589934592
    else:
        increment = (noise >> 9).to(tl.int32, bitcast=True) >> (23 - steps)
        position = (tl.minimum(magnitude, least).to(tl.float32, bitcast=True) * scale).to(tl.uint32)
        away = position + noise < position
    rounded = (magnitude + increment) & ~ones
    if not ZERO:
        rounded = tl.maximum(rounded, least)
    elif not FLAT:
        rounded = tl.where(magnitude < least, tl.where(away, least, 0), rounded)
    if SATURATE and SYMMETRIC:
        rounded = tl.minimum(rounded, top)
    else:
        end = tl.where(negative, floor, top)
        if not SATURATE:
            if MODE == TOWARD_ZERO:
                outward = magnitude == INFINITY
            elif MODE == UP:
                outward = (magnitude == INFINITY) | (bits >= 0)
            elif MODE == DOWN:
                outward = (magnitude == INFINITY) | negative
            else:
                outward = magnitude >= 0
            end = tl.where(outward, tl.where(negative, under, over), end)
        rounded = tl.where(rounded > tl.where(negative, bottom, top), end, rounded)
        is_nan |= rounded > INFINITY
    if SIGNED:
        signed = rounded | (bits & ~MASK)
        rounded = signed if KEEP_SIGN else tl.where(rounded == 0, 0, signed)
    return tl.where(is_nan, QUIET, rounded)
