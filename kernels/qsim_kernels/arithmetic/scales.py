"""Scales, from the largest magnitude of the elements that share one, and what elements are multiplied by before and after rounding.

A scale is computed in float64, whose quotients are precise enough for every rule, and stored as float32. Elements are computed in float32,
or in float64 if the tensor is. The functions are bound to the one or the other.
"""

from qsim_kernels.arithmetic.rounding import round_bits
from qsim_kernels.arithmetic.words import (
    INFINITY,
    MAGNITUDE,
    MANTISSA,
    ONE,
    SIGN,
    is_nan,
    is_zero,
    maximum,
    minimum,
    product,
    quotient,
    where,
)
from qsim_kernels.numbers.scales import ScaleRule

FIT, CEIL, FLOOR, EVEN, CEIL_LOG2, STOCHASTIC = map(int, ScaleRule)


def scale_of(amax, drawn, scales, rule, rounding):
    """The scale of some elements.

    Args:
        amax: The bits of their largest magnitude, divided by the scale of the whole tensor if theirs is under one.
        drawn: The random bits of the scale, as `rounding.random_bits` returns them; only rules that draw read them.
        scales: A `ScaleNumbers`.
        rule: A `ScaleRule`, known when code is compiled.
        rounding: The `Variant` of the rounding onto the scales' grid, `numbers.scales.variant_of_scales`.

    Returns:
        Its bits; NaN if the magnitude is not finite.
    """
    if rule == FLOOR:
        wanted = power_of(amax, scales)
    elif rule == EVEN:
        wanted = power_of(nearest_even(amax, scales.spare), scales)
    elif rule == CEIL_LOG2:
        wanted = power_of(power_above(amax), scales)
    elif rule == FIT or rule == CEIL or rule == STOCHASTIC:
        wanted = quotient(product(amax, scales.factor), scales.largest)
    scale = maximum(round_bits(wanted, drawn, scales.grid, rounding), scales.least)
    scale = where(amax == 0, scales.least, scale)
    return where(amax & MAGNITUDE < INFINITY, scale, INFINITY | INFINITY >> 1)


def power_of(amax, scales):
    """The power of two by which the largest magnitude gets the exponent of the largest value; any other if float64 does not have it."""
    field = (amax >> MANTISSA) + scales.power
    return minimum(maximum(field, 1), (INFINITY >> MANTISSA) - 1) << MANTISSA


def power_above(bits):
    """The smallest power of two that is not below a number."""
    return bits + ((1 << MANTISSA) - 1) >> MANTISSA << MANTISSA


def nearest_even(bits, spare):
    """Clear the last bits of a number, rounding it to nearest with ties to even, whatever its exponent."""
    return (bits + ((1 << spare - 1) - 1) + (bits >> spare & 1)) >> spare << spare


def under_whole(scale, whole):
    """A scale times that of the whole tensor which it is under; saturates, because an infinite scale would turn zeros into NaN."""
    result = product(scale, whole)
    return where(result == INFINITY, INFINITY - 1, result)


def inverse(scale):
    """The factor of elements in place of a division by their scale."""
    return quotient(ONE, scale)


def kept_from_zero(quotients, x):
    """The number next to zero if an element became zero when it was divided, for roundings that lead away from zero."""
    return where(is_zero(x), quotients, where(is_zero(quotients), x & SIGN | 1, quotients))


def saturated(products, largest):
    """A rounded element times its scale, limited to the largest magnitude of the result's dtype; every NaN becomes the same."""
    return with_nan(limited(products, largest), products)


def limited(products, largest):
    """A number limited to a magnitude."""
    return minimum(products & MAGNITUDE, largest) | (products & SIGN)


def with_nan(result, x):
    """A result, and NaN where a number is NaN."""
    return where(is_nan(x), MAGNITUDE, result)


def to_bfloat16(products, largest):
    """The same for bfloat16, whose bits are the upper half of the result's."""
    return with_nan(nearest_even(limited(products, largest), 16), products)
