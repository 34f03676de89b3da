"""A faster way to round onto the grids of most formats: float32's own additions find the neighbours.

`meanings.triton.round_bits` rounds onto all others.
"""

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import INTERPRETED
from qsim_kernels.numbers.grid import Mode
from qsim_kernels.triton.device.directed import TOWARD_ZERO as INWARD, add_toward_zero, multiply_add
from qsim_kernels.triton.device.undecided import round_later

_MODES = (Mode.NEAREST, Mode.TOWARD_ZERO, Mode.UP, Mode.DOWN, Mode.ODD, Mode.STOCHASTIC)
NEAREST, TOWARD_ZERO, UP, DOWN, ODD, STOCHASTIC = (tl.constexpr(int(mode)) for mode in _MODES)
SIGN, NAN, INFINITY = map(tl.constexpr, (-(2**31), 0x7FFFFFFF, 0x7F800000))


@triton.jit
def clamp(x, grid, NAN_STAYS: tl.constexpr):
    """Clamp float32 values to a grid's range; NaN stays, as the positive one with all bits set, or becomes the largest value."""
    top = grid.top.to(tl.float32, bitcast=True)
    bottom = -grid.bottom.to(tl.float32, bitcast=True)
    if NAN_STAYS:
        x = tl.minimum(x, top, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, bottom, propagate_nan=tl.PropagateNan.ALL)
        if INTERPRETED:
            x = tl.where(x == x, x.to(tl.int32, bitcast=True), NAN).to(tl.float32, bitcast=True)
    else:
        if INTERPRETED:
            # The hardware minimum returns the number if the other operand is NaN; NumPy's depends on its version.
            x = tl.where(x == x, x, top)
        x = tl.maximum(tl.minimum(x, top), bottom)
    return x


@triton.jit
def end_of_additions(grid, ROUNDING: tl.constexpr):
    """Bits of the magnitude to which others are clamped: the largest value, or the one after it if what reaches that overflows."""
    return grid.top if ROUNDING.saturates else grid.top + (1 << (grid.shift + tl.maximum(grid.low - (grid.top >> 23), 0)))


@triton.jit
def clamped_magnitude(x, grid, ROUNDING: tl.constexpr):
    """Clamp magnitudes; NaN stays."""
    top = end_of_additions(grid, ROUNDING).to(tl.float32, bitcast=True)
    if INTERPRETED:
        return tl.minimum(tl.abs(x), top, propagate_nan=tl.PropagateNan.ALL)
    else:
        # One instruction. If `x` comes from 16 bits, the compiler would use a second one to clear the sign bit.
        TEXT: tl.constexpr = "{ .reg .f32 magnitude; abs.f32 magnitude, $1; min.NaN.f32 $0, magnitude, $2; }"
        return tl.inline_asm_elementwise(TEXT, "=f,f,f", [x, top], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def nearby_power(x, grid, ROUNDING: tl.constexpr, HALF: tl.constexpr):
    """Bits of a power of two, or with `HALF` 1.5 times it, near which float32's spacing is the grid's spacing at `x`."""
    lift = (grid.shift << 23) + (0x400000 if HALF else 0)
    power = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, grid.low << 23) + lift
    if ROUNDING.mode == NEAREST and ROUNDING.only_powers:
        # Between two powers of two the last bit of the sum is always odd: make it the last bit of the grid's code.
        power |= ((power >> 23) + (grid.parity >> 23)) & 1
    return power


@triton.jit
def round_nearest(x, grid, ROUNDING: tl.constexpr):
    """Round clamped float32 values to nearest on a grid with evenly spaced values around zero, ignoring the sign of zero.

    Adding and subtracting a large power of two leaves `x` rounded to the local spacing. With 1.5 times the power the sum stays in the
    same binade for either sign.
    """
    magic = nearby_power(x, grid, ROUNDING, True).to(tl.float32, bitcast=True)
    return (x + magic) - magic


@triton.jit
def round_magnitude(y, negative, drawn, grid, ROUNDING: tl.constexpr):
    """Round clamped float32 magnitudes, in any mode of `round_single`, onto a grid with evenly spaced values around zero.

    Args:
        y: Magnitudes.
        negative: Whether they are magnitudes of negative values.
        drawn: Random integers of 16 or 32 bits, for stochastic rounding.
        grid: `GridNumbers`.
        ROUNDING: The `KernelVariant`.
    """
    power = nearby_power(y, grid, ROUNDING, False)
    # The spacing is 2**-23 of this power, and 2**-16 of the spacing is 2**-39 of it.
    magic = power.to(tl.float32, bitcast=True)
    if ROUNDING.mode == NEAREST:
        rounded = (y + magic) - magic
    elif ROUNDING.mode == STOCHASTIC and ROUNDING.draws_16:
        # R in units of 2**-16 of the spacing: sums rounded toward zero reach the upper neighbour exactly when R carries them there.
        raised = multiply_add(drawn.to(tl.uint16).to(tl.float32), magic * 1.8189894035458565e-12, y, INWARD)
        rounded = add_toward_zero(raised, magic) - magic
    elif ROUNDING.mode == STOCHASTIC:
        # The same with 32 bits, the last 16 first. Rounding the first sum toward zero cannot change the outcome: it must reach the
        # neighbour minus the first bits, which is a float32 wherever the last bits can matter.
        unit = magic * 1.8189894035458565e-12
        raised = multiply_add((drawn & 0xFFFF).to(tl.float32), unit * 1.52587890625e-05, y, INWARD)
        raised = multiply_add((drawn >> 16).to(tl.float32), unit, raised, INWARD)
        rounded = add_toward_zero(raised, magic) - magic
    else:
        rounded = add_toward_zero(y, magic) - magic
        if ROUNDING.mode != TOWARD_ZERO:
            away = (rounded < y) & (negative if ROUNDING.mode == DOWN else ~negative)
            rounded = tl.where(away, rounded + magic * 1.1920928955078125e-07, rounded)
    return rounded


@triton.jit
def rounded_magnitudes(x, drawn, grid, ROUNDING: tl.constexpr):
    """Round float32 magnitudes to values, if `arguments.rounds_magnitudes`; see `round_single`."""
    y = clamped_magnitude(x, grid, ROUNDING)
    if ROUNDING.draws_late:
        return round_later(x, y, drawn, grid, ROUNDING.few_bits, grid.top)
    else:
        return round_magnitude(y, False, drawn, grid, ROUNDING)


@triton.jit
def round_single(x, drawn, grid, ROUNDING: tl.constexpr, FIX_NAN: tl.constexpr, CLAMPED: tl.constexpr = False):
    """Round float32 values onto a grid with evenly spaced values around zero.

    Args:
        x: Values.
        drawn: The output of `random_integers`.
        grid: `GridNumbers`.
        ROUNDING: The `KernelVariant`.
        FIX_NAN: Whether every NaN must become the canonical one; otherwise it is some NaN.
        CLAMPED: Whether the values have been through `clamp`.

    Returns:
        Bits of the rounded values.
    """
    if CLAMPED:
        y = tl.abs(x)
    elif ROUNDING.symmetric:
        # One instruction less than clamping from both sides.
        y = clamped_magnitude(x, grid, ROUNDING)
    else:
        x = clamp(x, grid, True)
        y = tl.abs(x)
    bits = x.to(tl.int32, bitcast=True)
    if ROUNDING.draws_late:
        largest = tl.maximum(end_of_additions(grid, ROUNDING), grid.bottom)
        result = round_later(x, y, drawn, grid, ROUNDING.few_bits, largest).to(tl.int32, bitcast=True)
    else:
        result = round_magnitude(y, bits < 0, drawn, grid, ROUNDING).to(tl.int32, bitcast=True) | (bits & SIGN)
    is_number = x == x
    if not ROUNDING.saturates:
        value = result.to(tl.float32, bitcast=True)
        # NaN stays: it is not larger. What replaces larger numbers may be NaN.
        result = tl.where(tl.abs(value) > grid.top.to(tl.float32, bitcast=True), grid.over | (bits & SIGN), result)
        is_number = (result & NAN) <= INFINITY
    if not ROUNDING.keep_sign:
        result = (result.to(tl.float32, bitcast=True) + 0.0).to(tl.int32, bitcast=True)
    if FIX_NAN:
        result = tl.where(is_number, result, NAN)
    return result
