"""Float32's bits as float64's and back, in integers alone."""

from qsim_kernels.arithmetic.words import maximum, minimum, where

#: The difference of the exponents' biases, and that of the stored bits of significands.
BIASES, BITS = 1023 - 127, 52 - 23


def widened(word):
    """The bits of a float64 for those of a float32, both without sign extension.

    Args:
        word: 32 bits.
    """
    field, mantissa = (word >> 23) & 0xFF, word & 0x7FFFFF
    exponent, rest = normalized(mantissa)
    normal = where(field == 0xFF, 0x7FF, field + BIASES) << 52 | mantissa << BITS
    subnormal = where(mantissa == 0, 0, ((exponent + BIASES) << 52) | rest << BITS)
    return where(field == 0, subnormal, normal) | (word >> 31) << 63


def normalized(mantissa):
    """A subnormal float32's exponent field, as if exponents went on below 1, and its mantissa after the leading one."""
    exponent = 1
    for shift in (16, 8, 4, 2, 1):
        short = mantissa < 1 << 24 - shift
        mantissa = where(short, mantissa << shift, mantissa)
        exponent = exponent - where(short, shift, 0)
    return exponent, mantissa & 0x7FFFFF


def narrowed(word):
    """The bits of a float32 for those of a float64 with the same value, both without sign extension; NaN is the one with all bits set.

    Args:
        word: 64 bits, of a value that float32 has.
    """
    field, mantissa = (word >> 52) & 0x7FF, (word >> BITS) & 0x7FFFFF
    below = maximum(BIASES + 1 - field, 0)
    subnormal = (mantissa | 1 << 23) >> minimum(below, 24)
    normal = (field - BIASES) << 23 | mantissa
    special = where(mantissa == 0, 0x7F800000, 0x7FFFFFFF)
    magnitude = where(field == 0x7FF, special, where(below > 0, subnormal, maximum(normal, 0)))
    return magnitude | (word >> 63) << 31
