"""The steps of running sums that are rounded after each term; see `RoundedSum` in `qsim_kernels.numbers.sums`.

The exact value of `a * b + s` is first rounded to odd, in float32 or float64, which takes three fused products and no case distinction.
Stochastic rounding adds its random number to the exact value truncated in float64, and truncates the sum.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import round_bits, sums
from qsim_kernels.triton.device.directed import (
    NEAREST,
    TOWARD_ZERO,
    add_toward_zero,
    from_halves,
    multiply_add,
    multiply_add_to_odd,
    upper_bits,
)
from qsim_kernels.triton.device.noise import as_added
from qsim_kernels.triton.device.rounding import SIGN, STOCHASTIC, end_of_additions, round_magnitude
from qsim_kernels.triton.device.values import KernelVariant

INFINITY_DOUBLE: tl.constexpr = tl.constexpr(0x7FF00000)


class StepRounding(NamedTuple):
    """How a step is rounded.

    Attributes:
        native: A dtype whose conversion is the rounding: `tl.float32`, `tl.bfloat16` or `tl.float16`; None if there is none.
        fast: Whether adding and subtracting a power of two rounds.
        variant: The `KernelVariant`.
    """

    native: Any
    fast: bool
    variant: KernelVariant


class RoundedVariant(NamedTuple):
    """The compile-time numbers of a `RoundedSum`.

    Attributes:
        rounding: The `StepRounding` of sums.
        product: That of products.
        products: Whether products are rounded.
        kahan: Whether the sum is compensated.
        wide: Whether sums are computed in float64.
        roundings: The number of roundings of a term that draw random bits: 1, 2 or 4; 0 if there are none.
        promoted: Whether short sums are added up in float32.
        unroll: The number of terms that are computed at a time, without random bits.
    """

    rounding: StepRounding
    product: StepRounding
    products: bool
    kahan: bool
    wide: bool
    roundings: int
    promoted: bool
    unroll: int = 4


@triton.jit
def round_step(x, drawn, onto, rounding: tl.constexpr):
    """Round values that were rounded to odd (for stochastic rounding, in float64, toward zero) to a grid.

    Args:
        x: Values of the carrier.
        drawn: 32 random bits for each.
        onto: A `RuntimeRounding`.
        rounding: A `StepRounding`.
    """
    ROUNDING: tl.constexpr = rounding.variant
    grid, noise = onto.grid, onto.noise
    if rounding.native is not None:
        return x.to(rounding.native).to(x.dtype)
    elif rounding.fast and ROUNDING.mode == STOCHASTIC:
        return _stochastic(x, drawn, noise, grid, ROUNDING)
    elif rounding.fast:
        return _fast(x, grid, ROUNDING)
    elif ROUNDING.wide:
        return round_bits(x.to(tl.int64, bitcast=True), _added(drawn, noise, ROUNDING), grid, ROUNDING).to(tl.float64, bitcast=True)
    else:
        return round_bits(x.to(tl.int32, bitcast=True), 0, grid, ROUNDING).to(tl.float32, bitcast=True)


@triton.jit
def _added(drawn, noise, ROUNDING: tl.constexpr):
    """Random bits as `round_bits` takes them."""
    result = 0
    if ROUNDING.draws:
        result = as_added(drawn >> 16 if ROUNDING.draws_16 else drawn, noise, ROUNDING)
    return result


@triton.jit
def _fast(x, grid, ROUNDING: tl.constexpr):
    """Round float32 values to a symmetric grid with evenly spaced values around zero."""
    pattern = x.to(tl.int32, bitcast=True)
    beyond = end_of_additions(grid, ROUNDING)
    within = tl.minimum(tl.abs(x), beyond.to(tl.float32, bitcast=True), propagate_nan=tl.PropagateNan.ALL)
    result = round_magnitude(within, pattern < 0, 0, grid, ROUNDING)
    if not ROUNDING.saturates:
        # NaN stays: it is not larger.
        result = tl.where(result > grid.top.to(tl.float32, bitcast=True), grid.over.to(tl.float32, bitcast=True), result)
    result = (result.to(tl.int32, bitcast=True) | (pattern & SIGN)).to(tl.float32, bitcast=True)
    return result if ROUNDING.keep_sign else result + 0.0


@triton.jit
def _stochastic(x, drawn, noise, grid, ROUNDING: tl.constexpr):
    """Round float64 values stochastically to a symmetric grid with evenly spaced values around zero.

    With `u` the grid's spacing at a value and `R` the random number in units of `2**-32`, the sum of the magnitude, `u` and `R * u` is
    truncated to multiples of `u`, and `u` is subtracted. The first bits of a float64 are enough for values of the grid: the lower halves
    of their patterns are zero.
    """
    upper = upper_bits(x)
    power = tl.maximum(upper & INFINITY_DOUBLE, grid.low.to(tl.int32) << 20)
    spacing, magic = power + ((grid.shift.to(tl.int32) - 52) << 20), power + (grid.shift.to(tl.int32) << 20)
    # The correction has 53 bits, of which only the first 33 are not zero.
    kept = (drawn & noise.used.keep.to(tl.uint32)) | (noise.used.correction >> 21).to(tl.uint32)
    first, last = spacing | (kept >> 12).to(tl.int32), kept << 20 | ((noise.used.correction >> 1).to(tl.uint32) & 0x80000)
    raised = add_toward_zero(tl.abs(x), from_halves(first, last))
    truncated = add_toward_zero(raised, from_halves(magic, tl.zeros(magic.shape, tl.uint32)))
    rounded = upper_bits(truncated - from_halves(magic, tl.full(magic.shape, 1, tl.uint32)))
    # From the next value after the largest to infinity; NaN, whose pattern is above that, stays.
    beyond = ((grid.top >> 32) + (tl.full([], 1, tl.int64) << (grid.shift - 32))).to(tl.int32)
    end = ((grid.top if ROUNDING.saturates else grid.over) >> 32).to(tl.int32)
    rounded = tl.where((rounded - beyond).to(tl.uint32) <= (tl.full([], INFINITY_DOUBLE, tl.int32) - beyond).to(tl.uint32), end, rounded)
    result = from_halves(rounded | (upper & SIGN), tl.zeros(rounded.shape, tl.uint32))
    return result if ROUNDING.keep_sign else result + 0.0


@triton.jit
def add_rounded(term, x, drawn, grid, adder: tl.constexpr):
    """Add a term, a product of two numbers that may not be one of the carrier, to a number: one rounding."""
    a, b = term
    rounding: tl.constexpr = adder.rounding
    if rounding.native is tl.float32:
        return multiply_add(a, b, x, NEAREST)
    else:
        ROUNDING: tl.constexpr = rounding.variant
        STOCHASTICALLY: tl.constexpr = rounding.fast and ROUNDING.mode == STOCHASTIC
        exact = multiply_add(a, b, x, TOWARD_ZERO) if STOCHASTICALLY else multiply_add_to_odd(a, b, x)
        return round_step(exact, drawn, grid, rounding)


@triton.jit
def add_numbers(x, y, drawn, grid, adder: tl.constexpr):
    """Add two numbers of the carrier: one rounding."""
    return add_rounded((x, tl.full(x.shape, 1.0, x.dtype)), y, drawn, grid, adder)


@triton.jit
def itself(x):
    """A number."""
    return x


@triton.jit
def is_finite(x):
    """Whether a number is neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def negated(x):
    """A number with the other sign: times -1, because a unary minus here is a subtraction from zero, which has no -0."""
    return -1.0 * x


_WORDS = {"add_rounded": add_rounded, "add_numbers": add_numbers, "bits_of": itself, "is_finite": is_finite, "negated": negated}
kahan_step = sums(_WORDS).kahan_step


@triton.jit
def add_term(total, lost, term, drawn, grid, adder: tl.constexpr):
    """One step of a running sum.

    Args:
        total: The running sum.
        lost: What earlier additions lost, in a compensated sum.
        term: Two factors.
        drawn: The random bits of the step's roundings.
        grid: A `RuntimeRounding`.
        adder: A `RoundedVariant`.
    """
    if adder.kahan:
        total, lost = kahan_step(total, lost, term, drawn, grid, adder)
    else:
        total = add_rounded(term, total, drawn[0], grid, adder)
    return total, lost
