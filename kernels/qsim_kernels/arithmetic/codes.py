"""Codes of a grid's values, and values of codes.

Codes of sign and magnitude number the magnitudes upwards from zero; the sign is above them. Integers in two's complement count steps of
the smallest value. NaN and infinity have codes of their own, or none.
"""

from qsim_kernels.arithmetic.words import (
    INFINITY,
    MAGNITUDE,
    MANTISSA,
    SIGN,
    from_integer,
    is_nan,
    maximum,
    minimum,
    product,
    where,
)


def code_of(bits, coding, variant):
    """The code of a value.

    Args:
        bits: The bits of a value of the grid, or those of an infinity or NaN.
        coding: A `CodingBits`.
        variant: What is known when code is compiled: a `CodingVariant`.

    Returns:
        The code; of a NaN that has none, that of the largest value.
    """
    magnitude = minimum(bits & MAGNITUDE, coding.most)
    if variant.twos_complement:
        steps = steps_of(magnitude, coding)
        code = where(bits < 0, -steps, steps) & coding.mask
    else:
        code = (magnitude >> coding.shift) - coding.before
        if variant.zero:
            code = where(magnitude >> MANTISSA < coding.lowest, steps_of(magnitude, coding), code)
        if variant.infinity:
            code = where(bits & MAGNITUDE == INFINITY, coding.infinity, code)
        if variant.signed:
            code = where(bits < 0, code | coding.sign, code)
    return where(is_nan(bits), coding.nan, code)


def steps_of(magnitude, coding):
    """A multiple of the smallest step as an integer."""
    field = magnitude >> MANTISSA
    significand = (magnitude & ((1 << MANTISSA) - 1)) | where(field > 0, 1 << MANTISSA, 0)
    # The largest integers have one bit more than the carrier's significands, and end in a zero.
    excess = coding.shift + coding.lowest - maximum(field, 1) + 1
    return (significand << 1) >> minimum(maximum(excess, 0), MANTISSA + 2)


def value_of(code, coding, variant):
    """The bits of the value of a code, NaN for codes without one; see `code_of`."""
    if variant.twos_complement:
        steps = code
        if variant.signed:
            # The sign bit counts negatively.
            steps = (code ^ coding.sign) - coding.sign
        return product(from_integer(steps), coding.least)
    else:
        number = code & coding.mask
        bits = (number + coding.before) << coding.shift
        if variant.zero:
            below = 0
            if variant.subnormals:
                below = product(from_integer(number), coding.least)
            bits = where(number >> MANTISSA - coding.shift == 0, below, bits)
        bits = where(number > coding.last, MAGNITUDE, bits)
        if variant.infinity:
            bits = where(number == coding.infinity, INFINITY, bits)
        if variant.signed:
            bits = where(code & coding.sign == 0, bits, bits | SIGN)
        if variant.nan_is_zero:
            bits = where(code == coding.nan, MAGNITUDE, bits)
        return where(is_nan(bits), MAGNITUDE, bits)
