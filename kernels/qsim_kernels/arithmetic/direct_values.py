"""Values of codes as circuits compute them: the same as `codes.value_of`, with the names and comments that emitted code keeps.

A code of a normal value only gets another bias. Other codes count steps of the smallest value, so they are normalized.
"""

from qsim_kernels.arithmetic.words import INFINITY, MAGNITUDE, where


def bits_of_code(code, numbers, variant):
    """The bits of the value of a code, NaN for codes without one: a word of the carrier.

    Args:
        code: The code.
        numbers: A `ValueNumbers`.
        variant: What is known when the circuit is built: a `ValueVariant`.
    """
    # Decode the sign and the magnitude.
    sign = (code >> numbers.sign_place) & variant.signed
    if variant.twos_complement:
        magnitude = ((code ^ where(sign, numbers.mask, 0)) + sign) & numbers.mask
        return (sign << numbers.last_place) | (normalized(magnitude, numbers) << numbers.shift)
    magnitude = code & numbers.mask
    number = magnitude
    if not variant.flat:
        # A normal value gets the carrier's bias.
        field = magnitude >> numbers.mantissa
        fraction = magnitude & numbers.fraction
        exponent = field + numbers.before
        normal = (exponent << numbers.mantissa) | fraction
        subnormal = 0
        if variant.subnormals:
            subnormal = normalized(fraction, numbers)
        number = where(field == 0, subnormal, normal)
    is_nan = code < 0
    if variant.has_specials:
        # Infinity and NaN are above the largest value.
        is_infinite = magnitude == numbers.infinity
        is_nan = (magnitude > numbers.last) & (is_infinite ^ 1)
        number = where(is_infinite, INFINITY >> numbers.shift, number)
    if variant.nan_is_zero:
        # NaN has the code of minus zero.
        is_nan = sign & (magnitude == 0)
    negative = sign & (is_nan ^ 1)
    return (negative << numbers.last_place) | where(is_nan, MAGNITUDE, number << numbers.shift)


def normalized(steps, numbers):
    """The first bits of a number of steps of the smallest value."""
    front, distance = steps, 0
    for places in numbers.shifts:
        # A number of steps of the smallest value: its first bit moves to the front, and the distance gives the exponent.
        is_short = front < (1 << numbers.digits - places)
        front = where(is_short, (front << places) & numbers.ones, front)
        distance |= where(is_short, places, 0)
    binade = where(front >> numbers.digits - 1, numbers.past - distance, 0)
    return ((binade << numbers.digits - 1) | (front & (numbers.ones >> 1))) << numbers.spare
