"""Reading, rounding and writing one block of elements: the parts that kernels are made of."""

import triton
import triton.language as tl

from qsim_kernels.triton.noise import random_integers
from qsim_kernels.triton.rounding import INTERPRETED, STOCHASTIC, round_bits, round_single


@triton.jit
def load(block, place, left, MASKED: tl.constexpr):
    """The elements at some places of a block; zero where none are left."""
    if MASKED:
        elements = tl.load(block + place, mask=place < left, other=0)
    else:
        elements = tl.load(block + place)
    return elements


@triton.jit
def store(block, values, place, left, MASKED: tl.constexpr):
    """Stores elements at some places of a block, as many as are left."""
    if MASKED:
        tl.store(block + place, values, mask=place < left)
    else:
        tl.store(block + place, values)


@triton.jit
def as_single(x):
    """bfloat16 and float16 values as float32; bfloat16 by its bits, which are float32's upper half."""
    if x.dtype == tl.bfloat16:
        single = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        single = x.to(tl.float32)
    else:
        single = x
    return single


@triton.jit
def as_values(bits, TARGET: tl.constexpr, WIDE: tl.constexpr):
    """Patterns of the carrier as values of a type that holds them exactly; NaN as that type's with all bits set."""
    if TARGET == tl.float64:
        values = bits.to(tl.float64, bitcast=True)
    else:
        if WIDE:
            bits = bits.to(tl.float64, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        if TARGET == tl.float32:
            if WIDE:
                bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits)
            values = bits.to(tl.float32, bitcast=True)
        elif not INTERPRETED:
            # The processor's own conversion makes every NaN the one with all bits set.
            values = bits.to(tl.float32, bitcast=True).to(TARGET)
        elif TARGET == tl.bfloat16:
            bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits)
            values = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            half = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
            values = tl.where((half & 0x7FFF) > 0x7C00, 0x7FFF, half).to(tl.int16).to(tl.float16, bitcast=True)
    return values


@triton.jit
def rounded(x, first, noise, grid, V: tl.constexpr, FIX_NAN: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """A block of values, rounded, as patterns of the carrier.

    Args:
        x: The values.
        first: Logical index of the first.
        noise: `Noise`.
        grid: `Numbers`.
        V: The `Variant`.
        FIX_NAN: Whether every NaN must come out the same; otherwise it is some NaN.
        RUN: See `random_integers`.
        ALIGNED: See `random_integers`.
        BLOCK: How many values.
    """
    x = as_single(x)
    drawn = 0
    if V.mode == STOCHASTIC:
        drawn = random_integers(noise, first, V.halves, V.whole, RUN, ALIGNED, BLOCK)
        if V.halves and not V.fast:
            drawn <<= 16
        if V.wide:
            drawn = (drawn.to(tl.int64) << 1) | noise.late
    if V.fast:
        bits = round_single(x, drawn, grid, V, FIX_NAN)
    elif V.wide:
        bits = round_bits(x.to(tl.float64).to(tl.int64, bitcast=True), drawn, grid, V)
    else:
        bits = round_bits(x.to(tl.int32, bitcast=True), drawn, grid, V)
    return bits
