"""Functions of `arithmetic.sums` for machines that add float64 numbers: the same results with fewer operations.

Numbers are floats here. IEEE's arithmetic on infinities and NaN gives what is defined for them, so they need no attention.
"""

from qsim_kernels.arithmetic.words import BIAS, INFINITY, MAGNITUDE, MANTISSA, bits_of, from_bits, round_down, where


def power(exponent):
    """A power of two."""
    return from_bits((exponent + BIAS) << MANTISSA)


def rounded_down(x, unit):
    """A number, rounded down to a multiple of 2**unit."""
    return round_down(x * power(-unit)) * power(unit)


def exact_sum(x, y):
    """The sum of two numbers, for one that 53 bits hold."""
    return x + y


def add_to_odd(x, y):
    """The sum of two numbers, rounded to odd: what the nearest sum leaves over is exact, and says where that has to move."""
    near = x + y
    from_y = near - x
    rest = (x - (near - from_y)) + (y - from_y)
    bits = bits_of(near)
    is_inexact = (rest != 0) & (bits & MAGNITUDE < INFINITY)
    inward = bits + where((bits_of(rest) ^ bits) < 0, -1, 0)
    return from_bits(where(is_inexact, inward | 1, bits))


def positive_zero(x):
    """A number, with +0 in place of -0."""
    return x + 0.0


def negated(x):
    """A number with the other sign."""
    return -x
