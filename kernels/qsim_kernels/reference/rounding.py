"""Rounding onto a grid, on the bit patterns of the carrier: exact in every mode, with plain torch on any device.

A magnitude's pattern grows with its value and is evenly spaced within a binade. So the neighbour below is the pattern with its low bits
cleared, and adding enough to carry into the kept bits reaches the one above. The number of low bits depends only on the binade.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.carrier import DOUBLE, NOISE_BITS, SINGLE, GridBits, bits_that_matter
from qsim_kernels.grid import Mode, Rule
from qsim_kernels.reference.philox import ElementNoise, as_added, random_bits


def float_dtype(how: GridBits) -> torch.dtype:
    """The carrier's float dtype."""
    return torch.float64 if how.carrier == DOUBLE else torch.float32


def as_values(bits: Tensor, how: GridBits, dtype: torch.dtype) -> Tensor:
    """Convert the carrier's bit patterns to a dtype that holds their values exactly; NaN results do not depend on the processor."""
    if dtype == torch.bfloat16:
        single = bits if how.carrier == SINGLE else bits.view(torch.float64).to(torch.float32).view(torch.int32)
        return (single >> 16).to(torch.int16).view(dtype)
    values = bits.view(float_dtype(how)).to(torch.float32 if dtype != torch.float64 else dtype)
    if dtype == torch.float16:
        halves = values.to(dtype)
        return torch.where(halves.isnan(), 0x7FFF, halves.view(torch.int16)).view(dtype)
    return values


_NANS = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF),
}


def one_nan(x: Tensor) -> Tensor:
    """Replace every NaN by the canonical NaN that all roundings return."""
    pattern, nan = _NANS[x.dtype]
    if torch._C._are_functorch_transforms_active():
        # Before torch 2.13 vmap does not support `view(dtype)`.
        return torch.where(x.isnan(), torch.full((), nan, dtype=pattern, device=x.device).view(x.dtype), x)
    return x.view(pattern).masked_fill(x.isnan(), nan).view(x.dtype)


def rounded(bits: Tensor, how: GridBits, rule: Rule, noise: ElementNoise | None) -> Tensor:
    """Round values, given and returned as bit patterns of the carrier, drawing only random bits that can matter.

    The first 16 of 32 random bits decide nearly all roundings. The rest are drawn only where they could matter, because all zeros and all
    ones lead to different neighbours.

    Args:
        bits: int32 patterns of float32 values, or int64 patterns of float64 values, in one dimension.
        how: The grid.
        rule: The rounding.
        noise: The source of random bits, for stochastic rounding.
    """
    if rule.mode != Mode.STOCHASTIC:
        return round_bits(bits, how, rule, None)
    assert noise is not None  # the operators reject stochastic rounding without a seed
    used = bits_that_matter(how, rule)
    if used <= 16:
        return round_bits(bits, how, rule, as_added(random_bits(noise, used), used, rule.correction))
    first = noise.first_bits() << used - 16
    least = round_bits(bits, how, rule, as_added(first, used, rule.correction))
    most = round_bits(bits, how, rule, as_added(first + (1 << used - 16) - 1, used, rule.correction))
    open_ = (least != most).nonzero().view(-1)
    if open_.numel():
        drawn = as_added(random_bits(noise.of(open_), used), used, rule.correction)
        least[open_] = round_bits(bits[open_], how, rule, drawn)
    return least


def round_bits(bits: Tensor, how: GridBits, rule: Rule, noise: Tensor | None) -> Tensor:
    """Round values, given and returned as bit patterns of the carrier.

    Conditions are masks, integers with all bits set or none: integer arithmetic is several times faster than selecting by booleans.

    Args:
        bits: int32 patterns of float32 values, or int64 patterns of float64 values.
        how: The grid.
        rule: The rounding.
        noise: The output of `reference.philox.as_added`, for stochastic rounding.
    """
    magnitude = bits & ~how.carrier.sign
    rounded = signed(magnitude, bits, how, rule, noise)
    # Checking whether there is any NaN is cheaper than always replacing NaN.
    if rule.saturate and int(magnitude.amax()) <= how.carrier.infinity:
        return rounded
    return checked(rounded, magnitude, how, rule)


def signed(magnitude: Tensor, bits: Tensor, how: GridBits, rule: Rule, noise: Tensor | None) -> Tensor:
    """Round values, given their magnitudes too; the result for NaN is undefined."""
    rounded = _nearest_by_addition(magnitude, how) if rounds_by_addition(how, rule) else _rounded(magnitude, bits, how, rule, noise)
    if how.signed:
        sign = bits & how.carrier.sign
        if not how.negative_zero:
            sign &= -rounded >> how.carrier.last
        rounded |= sign
    return rounded


def checked(rounded: Tensor, magnitude: Tensor, how: GridBits, rule: Rule) -> Tensor:
    """Put the canonical NaN wherever the input is NaN."""
    nan = magnitude > how.carrier.infinity
    if not rule.saturate:
        nan |= (rounded & ~how.carrier.sign) > how.carrier.infinity
    # In compiled code `masked_fill` would reorder elements into logical order.
    return torch.where(nan, how.carrier.nan, rounded)


def rounds_by_addition(how: GridBits, rule: Rule) -> bool:
    """Whether `_nearest_by_addition` works: evenly spaced to zero, symmetric, more than one value per binade, room for the power."""
    if rule.mode != Mode.NEAREST or not rule.saturate:
        return False
    room = 1 <= how.shift < how.carrier.mantissa and (how.top >> how.carrier.mantissa) + how.shift <= 2 * how.carrier.bias
    return how.low > 0 and how.top == how.bottom and room


def _nearest_by_addition(magnitude: Tensor, how: GridBits) -> Tensor:
    """Add and subtract a power of two near which the carrier's spacing is the grid's: the addition rounds, ties to even."""
    mantissa = how.carrier.mantissa
    carrier = float_dtype(how)
    within = magnitude.clamp(max=how.top)
    power = (within & how.carrier.infinity).clamp_(min=how.low << mantissa).add_(how.shift << mantissa).view(carrier)
    return within.view(carrier).add(power).sub_(power).view(within.dtype)


def _rounded(magnitude: Tensor, bits: Tensor, how: GridBits, rule: Rule, noise: Tensor | None) -> Tensor:
    """Round magnitudes; the result for NaN is undefined."""
    negative = bits >> how.carrier.last
    shift = _shift(magnitude, how)
    kept = -1 << shift if isinstance(shift, int) else torch.bitwise_left_shift(-1, shift)
    rounded = _increment(magnitude, negative, shift, kept, how, rule, noise)
    rounded = rounded.add_(magnitude).bitwise_and_(kept)
    if how.least:
        below = (magnitude - how.least) >> how.carrier.last
        if how.zero:
            chosen = _leaves_zero(magnitude, negative, how, rule, noise).bitwise_and_(how.least)
            rounded.bitwise_xor_(chosen.bitwise_xor_(rounded).bitwise_and_(below))
        else:
            rounded.clamp_(min=how.least)
    return _limit(rounded, magnitude, negative, how, rule)


def _shift(magnitude: Tensor, how: GridBits) -> Tensor | int:
    """The number of low bits to round away: constant, or growing the further a value is below the lowest binade with its own spacing."""
    if not how.low:
        return how.shift
    # The same as how.low - field, from `how.shift` upwards.
    mantissa = how.carrier.mantissa
    return (how.low + how.shift - (magnitude >> mantissa)).clamp_(how.shift, mantissa)


def _increment(
    magnitude: Tensor, negative: Tensor, shift: Tensor | int, kept: Tensor | int, how: GridBits, rule: Rule, noise: Tensor | None
) -> Tensor:
    """The number to add so that clearing the low bits, those not in the mask `kept`, leaves the neighbour that the rounding chooses."""
    ones = ~kept
    match rule.mode:
        case Mode.NEAREST:
            last = (magnitude ^ how.parity if how.parity else magnitude) >> shift
            return last.bitwise_and_(1 if how.shift else ones & 1).add_(ones >> 1)
        case Mode.NEAREST_AWAY:
            return torch.zeros_like(magnitude).add_((ones + 1) >> 1)
        case Mode.NEAREST_UP:
            return (ones + 1 + negative) >> 1
        case Mode.TOWARD_ZERO:
            return torch.zeros_like(magnitude)
        case Mode.UP:
            return ~negative & ones
        case Mode.DOWN:
            return negative & ones
        case Mode.ODD:
            even = ((magnitude ^ how.parity) >> shift).bitwise_and_(1).bitwise_xor_(1)
            return even * ones
    assert noise is not None  # the operators reject stochastic rounding without a seed
    mantissa = how.carrier.mantissa
    aligned = noise >> (NOISE_BITS - mantissa) if mantissa < NOISE_BITS else noise << (mantissa - NOISE_BITS)
    return aligned.to(magnitude.dtype).bitwise_right_shift_(mantissa - shift)


def _leaves_zero(magnitude: Tensor, negative: Tensor, how: GridBits, rule: Rule, noise: Tensor | None) -> Tensor:
    """Mask of the magnitudes below the smallest value that round to it instead of zero."""
    last = how.carrier.last
    inexact = -magnitude >> last
    match rule.mode:
        case Mode.NEAREST:
            return (how.half - magnitude) >> last
        case Mode.NEAREST_AWAY:
            return (how.half - 1 - magnitude) >> last & inexact
        case Mode.NEAREST_UP:
            return (how.half - 1 - negative - magnitude) >> last & inexact
        case Mode.TOWARD_ZERO:
            return torch.zeros_like(inexact)
        case Mode.UP:
            return inexact & ~negative
        case Mode.DOWN:
            return inexact & negative
        case Mode.ODD:
            return inexact
    assert noise is not None
    # Above the smallest value the position is meaningless and might not fit an int64.
    position = magnitude.clamp(max=how.least).view(float_dtype(how)) * how.scale
    return position.to(torch.int64).add_(noise).bitwise_right_shift_(NOISE_BITS).to(magnitude.dtype).neg_()


def _limit(rounded: Tensor, magnitude: Tensor, negative: Tensor, how: GridBits, rule: Rule) -> Tensor:
    """Replace values beyond the largest as the rule says."""
    if rule.saturate and how.top == how.bottom:
        return rounded.clamp_(max=how.top)
    if not rule.saturate and how.is_open and rule.mode in (Mode.NEAREST, Mode.STOCHASTIC):
        return rounded
    # -0 is zero, not a number below every value of a set without zero.
    is_negative = (negative < 0) & (magnitude > 0)
    largest = torch.where(is_negative, how.bottom, how.top)
    end = torch.where(is_negative, how.floor, how.top)
    beyond = rounded > largest
    if not rule.saturate:
        inward = _is_inward(is_negative, rule) & (magnitude < how.carrier.infinity)
        end = torch.where(inward, end, torch.where(is_negative, how.under, how.over))
    return torch.where(beyond, end, rounded).to(rounded.dtype)


def _is_inward(negative: Tensor, rule: Rule) -> Tensor:
    """Whether the rounding never goes past the largest value from a finite one."""
    match rule.mode:
        case Mode.TOWARD_ZERO:
            return torch.ones_like(negative)
        case Mode.UP:
            return negative
        case Mode.DOWN:
            return ~negative
    return torch.zeros_like(negative)
