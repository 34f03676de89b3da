"""Rounding onto a grid, on the bit patterns of the carrier: exact in every mode, with plain torch on any device.

A magnitude's pattern grows with its value and is evenly spaced within a binade. So the neighbour below is the pattern with its low bits
cleared, and to reach the one above is to add enough to carry into the kept bits. How many bits are low depends on the binade alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.carrier import NOISE_BITS, Plan
from qsim_kernels.grid import Mode, Rule


def round_bits(bits: Tensor, plan: Plan, rule: Rule, noise: Tensor | None) -> Tensor:
    """Rounds values, given and returned as bit patterns of the carrier.

    Args:
        bits: int32 patterns of float32 values, or int64 patterns of float64 values.
        plan: The grid.
        rule: The rounding.
        noise: What `reference.philox.noise` gives, for stochastic rounding.
    """
    magnitude = bits & ~plan.carrier.sign
    negative = bits < 0
    infinity = plan.carrier.infinity
    nan = magnitude > infinity
    shift = _shift(magnitude, plan)
    ones = (1 << shift) - 1 if isinstance(shift, int) else torch.bitwise_left_shift(torch.ones_like(shift), shift).sub_(1)
    rounded = (magnitude + _increment(magnitude, negative, shift, ones, plan, rule, noise)).bitwise_and_(~ones)
    if plan.least:
        away = _leaves_zero(magnitude, negative, plan, rule, noise) if plan.zero else torch.ones_like(negative)
        rounded = torch.where(magnitude < plan.least, away.to(bits.dtype).mul_(plan.least), rounded)
    rounded = _limit(rounded, magnitude, negative, plan, rule)
    if plan.signed:
        sign = bits & plan.carrier.sign
        rounded = rounded | (sign if plan.negative_zero else torch.where(rounded == 0, 0, sign))
    if not rule.saturate:
        nan = nan | ((rounded & ~plan.carrier.sign) > infinity)
    return rounded.masked_fill_(nan, plan.carrier.nan)


def _shift(magnitude: Tensor, plan: Plan) -> Tensor | int:
    """How many low bits are rounded away: constant, or more the further a value lies below the lowest binade with a spacing of its own."""
    if not plan.low:
        return plan.shift
    below = plan.low - (magnitude >> plan.carrier.mantissa)
    return below.clamp_(0, plan.carrier.mantissa - plan.shift).add_(plan.shift)


def _increment(
    magnitude: Tensor, negative: Tensor, shift: Tensor | int, ones: Tensor | int, plan: Plan, rule: Rule, noise: Tensor | None
) -> Tensor | int:
    """What to add so that clearing the low bits, `ones`, leaves the neighbour that the rounding chooses."""
    match rule.mode:
        case Mode.NEAREST:
            return ((magnitude + plan.parity) >> shift).bitwise_and_(ones & 1).add_(ones >> 1)
        case Mode.NEAREST_AWAY:
            return (ones + 1) >> 1
        case Mode.NEAREST_UP:
            return torch.where(negative, ones >> 1, (ones + 1) >> 1).to(magnitude.dtype)
        case Mode.TOWARD_ZERO:
            return 0
        case Mode.UP:
            return torch.where(negative, 0, ones).to(magnitude.dtype)
        case Mode.DOWN:
            return torch.where(negative, ones, 0).to(magnitude.dtype)
        case Mode.ODD:
            even = ((magnitude + plan.parity) >> shift).bitwise_and_(1).bitwise_xor_(1)
            return even * ones
    assert noise is not None  # the operators refuse stochastic rounding without a seed
    kept = plan.carrier.mantissa
    aligned = noise >> (NOISE_BITS - kept) if kept < NOISE_BITS else noise << (kept - NOISE_BITS)
    return aligned.to(magnitude.dtype) >> (kept - shift)


def _leaves_zero(magnitude: Tensor, negative: Tensor, plan: Plan, rule: Rule, noise: Tensor | None) -> Tensor:
    """Whether a magnitude below the smallest value goes to it instead of zero."""
    inexact = magnitude > 0
    match rule.mode:
        case Mode.NEAREST:
            return magnitude > plan.half
        case Mode.NEAREST_AWAY:
            return (magnitude >= plan.half) & inexact
        case Mode.NEAREST_UP:
            return (magnitude > plan.half) | ((magnitude == plan.half) & inexact & ~negative)
        case Mode.TOWARD_ZERO:
            return torch.zeros_like(inexact)
        case Mode.UP:
            return inexact & ~negative
        case Mode.DOWN:
            return inexact & negative
        case Mode.ODD:
            return inexact
    assert noise is not None
    carrier = torch.float32 if magnitude.dtype == torch.int32 else torch.float64
    # Above the smallest value the position means nothing, and might not fit an int64.
    position = magnitude.clamp(max=plan.least).view(carrier) * plan.scale
    return position.to(torch.int64).add_(noise) >= 1 << NOISE_BITS


def _limit(rounded: Tensor, magnitude: Tensor, negative: Tensor, plan: Plan, rule: Rule) -> Tensor:
    """Puts what lies beyond the largest value where the rule says."""
    if rule.saturate and plan.top == plan.bottom:
        return rounded.clamp_(max=plan.top)
    # -0 is zero, not a number below every value of a set without zero.
    negative = negative & (magnitude > 0)
    largest = torch.where(negative, plan.bottom, plan.top)
    end = torch.where(negative, plan.floor, plan.top)
    beyond = rounded > largest
    if not rule.saturate:
        inward = _is_inward(negative, rule) & (magnitude < plan.carrier.infinity)
        end = torch.where(inward, end, torch.where(negative, plan.under, plan.over))
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
