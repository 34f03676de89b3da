"""Building blocks of kernels: rounding a block of elements, to values or to codes."""

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import INTERPRETED, elements, round_bits
from qsim_kernels.triton.device.codes import codes_of, narrow_integers_of
from qsim_kernels.triton.device.rounding import NAN, NEAREST, clamp, round_magnitude, round_nearest, round_single
from qsim_kernels.triton.device.undecided import round_later

nearest_even, with_nan = elements.nearest_even, elements.with_nan


@triton.jit
def as_single(x):
    """Convert bfloat16 and float16 values to float32; bfloat16 by its bits, which are float32's upper half."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def with_one_nan(x):
    """Replace every NaN by the canonical one."""
    if x.dtype == tl.float64:
        pattern = tl.where(x == x, x.to(tl.int64, bitcast=True), 0x7FFFFFFFFFFFFFFF)
    else:
        pattern = tl.where(x == x, x.to(tl.int32, bitcast=True), NAN)
    return pattern.to(x.dtype, bitcast=True)


@triton.jit
def narrowed(x, TARGET: tl.constexpr):
    """Round float32 values to nearest in the stored type; every NaN becomes the same."""
    if TARGET == tl.float32:
        return with_one_nan(x)
    elif INTERPRETED and TARGET == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        return (with_nan(nearest_even(bits, 16), bits) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif INTERPRETED:
        bits = x.to(TARGET).to(tl.int16, bitcast=True)
        return tl.where(x == x, bits, 0x7FFF).to(tl.int16).to(TARGET, bitcast=True)
    else:
        # The hardware conversion to 16 bits turns every NaN into the one with all bits set.
        return x.to(TARGET)


@triton.jit
def as_dtype(values, TARGET: tl.constexpr):
    """Convert float32 or float64 values, whose NaN are canonical, to a type that holds them exactly."""
    if values.dtype == TARGET:
        return values
    else:
        return narrowed(values.to(tl.float32), TARGET)


@triton.jit
def rounded(x, drawn, grid, ROUNDING: tl.constexpr, FIX_NAN: tl.constexpr, CLAMPED: tl.constexpr = False):
    """Round a block of values, to floats of the carrier.

    Args:
        x: float32 or float64 values.
        drawn: The output of `random_integers`.
        grid: `GridNumbers`.
        ROUNDING: The `KernelVariant`.
        FIX_NAN: Whether every NaN must become the canonical one; otherwise it is some NaN.
        CLAMPED: Whether the values have been through `clamp`.
    """
    if ROUNDING.fast:
        bits = round_single(x, drawn, grid, ROUNDING, FIX_NAN, CLAMPED)
    elif ROUNDING.wide:
        bits = round_bits(x.to(tl.float64).to(tl.int64, bitcast=True), drawn, grid, ROUNDING)
    else:
        bits = round_bits(x.to(tl.int32, bitcast=True), drawn, grid, ROUNDING)
    return bits.to(tl.float64 if ROUNDING.wide else tl.float32, bitcast=True)


@triton.jit
def note_lost(lost, values):
    """Set `lost` if there is a NaN: a row's sum of magnitudes is NaN if one of them is. Values past the last element are zero."""
    total = tl.sum(tl.abs(values), axis=1)
    tl.store(lost + tl.arange(0, values.shape[0]) * 0, 1, mask=total != total)


@triton.jit
def encoded(x, drawn, grid, coding, ROUNDING: tl.constexpr, CODING: tl.constexpr, NARROW: tl.constexpr, CLAMPED: tl.constexpr = False):
    """Round a block of values and return their codes.

    Args:
        x: float32 or float64 values.
        drawn: The output of `random_integers`.
        grid: `GridNumbers`.
        coding: `Codes`.
        ROUNDING: The `KernelVariant`.
        CODING: The `CodeVariant`.
        NARROW: Whether codes have at most 16 bits.
        CLAMPED: Whether the values have been through `clamp`.
    """
    if ROUNDING.fast and ROUNDING.saturates:
        clean = x if CLAMPED else clamp(x, grid, CODING.nan)
        signs = clean.to(tl.int32, bitcast=True)
        if ROUNDING.mode == NEAREST:
            clean = round_nearest(clean, grid, ROUNDING)
        elif ROUNDING.draws_late:
            clean = round_later(clean, tl.abs(clean), drawn, grid, ROUNDING.few_bits, tl.maximum(grid.top, grid.bottom))
        else:
            clean = round_magnitude(tl.abs(clean), clean < 0, drawn, grid, ROUNDING)
            if CODING.twos_complement:
                clean = tl.where(signs < 0, -clean, clean)
        if CODING.twos_complement and NARROW:
            return narrow_integers_of(clean, coding)
        else:
            return codes_of(clean, signs, coding, CODING)
    elif ROUNDING.table:
        codes = rounded(x, drawn, grid, ROUNDING, True)
        return tl.where(codes == codes, codes.to(grid.top.dtype, bitcast=True), coding.nan)
    else:
        values = rounded(x, drawn, grid, ROUNDING, True)
        clean = values if CODING.nan else tl.where(values == values, values, grid.top.to(values.dtype, bitcast=True))
        return codes_of(clean, clean.to(grid.top.dtype, bitcast=True), coding, CODING)
