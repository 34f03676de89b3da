"""Rounding to codes in one step, as circuits do it: from the bits of a number to a code, without the bits of the rounded number between.

The result is that of `codes.code_of` for a number that `rounding.round_bits` has rounded. Codes of sign and magnitude number the magnitudes
upwards from zero. So rounding up adds one to the code of the neighbour below, whether or not that is subnormal, and whether or not the sum
has another exponent.

Emitted code keeps the names of the variables, and the comments above them.
"""

from qsim_kernels.arithmetic.words import INFINITY, MAGNITUDE, MANTISSA, where
from qsim_kernels.numbers.grid import Mode, Overflow

NEAREST, NEAREST_AWAY, NEAREST_UP, TOWARD_ZERO, UP, DOWN, ODD, STOCHASTIC, NEAREST_DOWN, STOCHASTIC_EVEN = map(int, Mode)
NONFINITE, SATURATE, SATURATE_SYMMETRIC = map(int, Overflow)


def parts(word, numbers):
    """The sign, the exponent field, the first bits of the fraction, whether later ones are set, and whether the number is NaN."""
    # Decode the number; of the last bits of its fraction, it only matters whether one is set.
    sign = word >> numbers.sign_place
    field = (word >> MANTISSA) & numbers.last_field
    fraction = word & ((1 << MANTISSA) - 1)
    leading = (fraction << numbers.spare) >> numbers.cut
    trailing = (fraction & ((1 << numbers.cut) - 1)) > 0
    is_nan = (field == numbers.last_field) & ((leading > 0) | trailing)
    return sign, field, leading, trailing, is_nan


def below_normal(field, leading, numbers, variant):
    """A number below the normal values.

    Returns:
        Whether it is one, its significand at its place in a code with the bits that the rounding tests, how many places farther than in the
        first binade it has moved right, and whether a bit that is set has moved out.
    """
    if variant.flat:
        return 0, 0, 0, 0
    # Below the normal values, the significand moves right by one more place with each binade.
    is_small = field < numbers.lowest
    is_tiny = field < numbers.tiny
    significand = leading | (1 << numbers.width)
    distance = (numbers.lowest - 1 - field) & numbers.deepest
    subnormal = where(is_tiny, 0, significand >> numbers.step >> distance)
    if variant.mode == STOCHASTIC:
        return is_small, subnormal, distance, 0
    moved_out = ((1 << numbers.step + numbers.deepest) - 1) >> (distance ^ numbers.deepest)
    lost = is_small & ((significand & moved_out) > 0)
    if variant.mode in (UP, DOWN, ODD):
        # These modes ask whether anything is lost, also of numbers that nearest values round to zero.
        lost = where(is_tiny, (field > 0) | (leading > 0), lost)
    return is_small, subnormal, distance, lost


def limited(word, sign, is_nan, numbers, variant):
    """Whether a number is NaN or its magnitude beyond the largest value, the code of its magnitude then, and its sign."""
    # Magnitudes beyond the largest value have one code, and NaN has the sign of its own.
    negative = where(is_nan, numbers.nan_sign, sign)
    is_beyond = (word & MAGNITUDE) >= where(sign, numbers.limit_below, numbers.limit)
    largest = where(sign, numbers.last_below, numbers.last)
    if variant.overflow == NONFINITE:
        is_infinite = (word & MAGNITUDE) == INFINITY
        largest = where(overflows(is_infinite, sign, variant), numbers.last + 1, largest)
    limit = where(is_nan, numbers.nan, largest)
    return is_beyond, limit, negative


def overflows(is_infinite, sign, variant):
    """Whether a magnitude beyond the largest value becomes the code above it, which is infinity if the format has infinities."""
    if variant.mode == TOWARD_ZERO:
        return is_infinite
    elif variant.mode == UP:
        return is_infinite | (sign ^ 1)
    elif variant.mode == DOWN:
        return is_infinite | sign
    else:
        return 1


def goes_up(kept, guard, sticky, sign, variant):
    """Whether the result is the neighbour above.

    Args:
        kept: The code of the neighbour below.
        guard: The next bit, if the rounding is to nearest.
        sticky: Whether later bits are set.
        sign: Whether the number is negative.
        variant: A `DirectVariant`.
    """
    if variant.mode == NEAREST:
        return guard & (sticky | (kept & 1))
    elif variant.mode == NEAREST_AWAY:
        return guard
    elif variant.mode == NEAREST_UP:
        return guard & (sticky | (sign ^ 1))
    elif variant.mode == NEAREST_DOWN:
        return guard & (sticky | sign)
    elif variant.mode == TOWARD_ZERO:
        return 0
    elif variant.mode == UP:
        return sticky & (sign ^ 1)
    elif variant.mode == DOWN:
        return sticky & sign
    else:
        # ODD: the neighbour whose code ends in 1.
        return sticky & ((kept & 1) ^ 1)


def packed(negative, rounded, is_nan, numbers, variant):
    """The code of a sign and a magnitude's code."""
    if not variant.signed:
        return where(negative, 0, rounded)
    if variant.overflow_is_nan:
        # Magnitudes that overflow become NaN.
        is_nan = is_nan | (rounded > numbers.last)
        negative = where(is_nan, numbers.nan_sign, negative)
        rounded = where(is_nan, numbers.nan, rounded)
    if variant.twos_complement:
        return where(negative, 0 - rounded, rounded) & numbers.mask
    if not variant.negative_zero:
        # Zero has no sign.
        negative = negative & ((rounded > 0) | is_nan)
    return (negative << numbers.bits) | rounded


def code_of_rounded(word, random, numbers, variant):
    """Round a number and return the code of the result.

    Args:
        word: The number's bits, without a sign: a word of the carrier.
        random: As many random bits as stochastic rounding reads.
        numbers: A `DirectNumbers`.
        variant: What is known when the circuit is built: a `DirectVariant`.
    """
    sign, field, leading, trailing, is_nan = parts(word, numbers)
    is_small, subnormal, _, lost = below_normal(field, leading, numbers, variant)
    # Truncate it to the code of the neighbour toward zero and the first bits that this lacks. A normal value only gets another bias.
    exponent = (field - numbers.before) & numbers.exponents
    normal = (exponent << numbers.width) | leading
    truncated = where(is_small, subnormal, normal)
    is_beyond, limit, negative = limited(word, sign, is_nan, numbers, variant)
    window = where(is_beyond, limit << numbers.tail, truncated)
    if variant.mode == STOCHASTIC:
        # Round: the random bits carry into the code of the neighbour below.
        carried = window + ((random << variant.correction) | variant.correction)
        rounded = (carried >> numbers.tail) & numbers.ones
    else:
        # Round: keep the code of the neighbour below, or add one to it.
        kept = window >> numbers.tail
        guard = window & ((1 << numbers.tail) - 1)
        sticky = trailing | lost
        if variant.mode in (UP, DOWN, ODD):
            sticky = sticky & (is_beyond ^ 1)
        increment = goes_up(kept, guard, sticky, sign, variant)
        if variant.twos_complement:
            # A negative number is ~kept + 1, or ~kept if its magnitude is rounded up.
            complement = where(negative, kept ^ numbers.mask, kept)
            return (complement + (increment ^ negative)) & numbers.mask
        rounded = (kept + increment) & numbers.ones
    if variant.flush:
        # Numbers below the normal values become zero.
        rounded = where(is_small, 0, rounded)
    elif not variant.subnormals:
        # There is no value between zero and the smallest normal one.
        rounded = where(is_small, (rounded & 1) << numbers.mantissa, rounded)
    return packed(negative, rounded, is_nan, numbers, variant)


def bits_of_rounded(word, random, numbers, variant):
    """Round a number and return the bits of the result, in the carrier of the number.

    Args:
        word: See `code_of_rounded`.
        random: See `code_of_rounded`.
        numbers: A `DirectNumbers`, in which the carrier's bits of magnitudes that end with the format's mantissa are the codes.
        variant: See `code_of_rounded`.
    """
    sign, field, leading, trailing, is_nan = parts(word, numbers)
    is_small, subnormal, distance, lost = below_normal(field, leading, numbers, variant)
    is_beyond, limit, negative = limited(word, sign, is_nan, numbers, variant)
    # The last bit of the neighbour toward zero, and the first bits that this lacks.
    last_bits = where(is_small, subnormal, ((field - numbers.before) << numbers.width) | leading) & ((2 << numbers.tail) - 1)
    guard = last_bits & ((1 << numbers.tail) - 1)
    if variant.mode == STOCHASTIC:
        increment = (guard + ((random << variant.correction) | variant.correction)) >> numbers.tail
    else:
        sticky = trailing | lost
        increment = goes_up(last_bits >> numbers.tail, guard, sticky, sign, variant)
    kept = (word & MAGNITUDE) >> numbers.shift
    cleared = where(is_small, ((numbers.fraction << 1 << (distance & numbers.places)) & numbers.fraction) ^ numbers.fraction, 0)
    is_below = field < numbers.first
    if variant.mode == TOWARD_ZERO:
        # Clear the bits that the neighbour lacks.
        below_limit = where(is_below, 0, kept & (cleared ^ numbers.ones))
        rounded = where(is_beyond, limit, below_limit)
    else:
        smallest = numbers.first << numbers.mantissa
        if variant.flush:
            smallest = 0
        # Round in place: bits that the neighbours lack are ones, so that they carry, and are cleared.
        filled = where(is_below, where(increment, smallest, 0), kept | cleared)
        added = increment & (is_below ^ 1) & (is_beyond ^ 1)
        rounded = ((where(is_beyond, limit, filled) + added) & numbers.ones) & (cleared ^ numbers.ones)
    if variant.overflow_is_nan:
        # Magnitudes that overflow become NaN.
        is_nan = is_nan | (rounded > numbers.last)
        negative = where(is_nan, 0, negative)
        rounded = where(is_nan, numbers.nan, rounded)
    elif variant.overflow == NONFINITE:
        # Magnitudes that overflow become infinity.
        rounded = where((rounded > numbers.last) & (is_nan ^ 1), INFINITY >> numbers.shift, rounded)
    if not variant.signed:
        rounded, negative = where(negative, 0, rounded), 0
    elif not variant.negative_zero:
        # Zero has no sign.
        negative = negative & (rounded > 0)
    rest = where(is_nan, (1 << numbers.shift) - 1, 0)
    return (((negative << numbers.bits) | rounded) << numbers.shift) | rest
