"""Sums of products, step by step and in integers alone; `numbers.sums` says what each kind of sum is.

Numbers are given by the bits of a float64, which holds the product of two float32 numbers exactly. Numbers are aligned by counting them in
units of a power of two, `2**unit`; a float64 holds the count of every sum of a step.

Arguments that several functions take:
    total: The running sum.
    terms: The terms that a step adds: products, or exact sums of products, each a `value` and the `exponent` with which it counts.
    drawn: The random bits of a rounding, as `round_bits` takes them, or of several; `draw` returns those of the rounding with an index.
    grid: The `GridBits` of the running sum.
    adder: The description of the sum in `numbers.sums`, or what a machine keeps of it: `fraction`, `rounding` and so on.
"""

from qsim_kernels.arithmetic.rounding import round_bits
from qsim_kernels.arithmetic.words import (
    BIAS,
    INFINITY,
    MAGNITUDE,
    MANTISSA,
    SIGN,
    assuming,
    bit_length,
    bits_of,
    from_bits,
    is_nan,
    maximum,
    minimum,
    where,
)
from qsim_kernels.numbers.sums import LEAST_EXPONENT

#: The exponent of a zero, below those of all products, and the least one of products that are added before the running sum.
NO_EXPONENT, LEAST_OF_PRODUCTS = -4096, -300
#: The exponents of float32's smallest normal numbers, and of infinities and NaN.
LEAST_NORMAL, MOST_EXPONENT = -126, 128
#: Bits behind the last of a significand where numbers are subtracted.
GUARD = 3


def aligned_sum(total, steps, grid, adder):
    """The running sum after all steps of a matrix unit, each with some terms; never -0."""
    for terms in steps:
        total = aligned_step(total, terms, grid, adder)
    return positive_zero(total)


def aligned_step(total, terms, grid, adder):
    """Add terms to a running sum: all are aligned to the largest exponent, truncated, and added exactly."""
    largest = largest_exponent(exponent_unless_zero(bits_of(total), adder.low, LEAST_EXPONENT), terms, adder)
    return running_sum(truncated_sum(total, terms, largest - adder.fraction, adder, 0, 1), grid, adder)


def running_sum(exact, grid, adder):
    """The exact sum of a step on the grid; from the next value after the largest on it is infinite, even if it is truncated."""
    bits = bits_of(exact)
    is_beyond = (bits & MAGNITUDE >= grid.top + (1 << grid.shift)) & (bits & MAGNITUDE <= INFINITY)
    return from_bits(where(is_beyond, (bits & SIGN) | INFINITY, round_bits(bits, 0, grid, adder.rounding)))


def two_step_sum(total, steps, grid, adder):
    """The running sum after all steps of a matrix unit that adds terms first."""
    for terms in steps:
        total = two_step(total, terms, grid, adder)
    return total


def two_step(total, terms, grid, adder):
    """Add terms, those at even and at odd places apart or all together, and then the running sum, which is a float32 number."""
    even, odd = largest_exponents(terms, adder)
    largest = maximum(even, odd)
    if adder.apart:
        first = rounded_down(truncated_sum(0, terms, even - adder.fraction, adder, 0, 2), largest - adder.fraction)
        products = exact_sum(first, rounded_down(truncated_sum(0, terms, odd - adder.fraction, adder, 1, 2), largest - adder.fraction))
    else:
        products = truncated_sum(0, terms, largest - adder.fraction, adder, 0, 1)
    running = exponent_of(bits_of(total), LEAST_NORMAL)
    largest = maximum(largest, running)
    kept = rounded_down(total, largest - adder.fraction)
    if adder.apart:
        kept = where((running < largest - adder.fraction - 1) & is_finite(bits_of(total)), 0, kept)
    exact = exact_sum(rounded_down(products, largest - adder.second), kept)
    return onto_grid(positive_zero(exact), 0, grid, adder)


def infinite_beyond(bits):
    """A product as a unit with two steps adds it: infinite from 2**128 on."""
    is_beyond = (bits & MAGNITUDE >= (BIAS + MOST_EXPONENT) << MANTISSA) & (bits & MAGNITUDE <= INFINITY)
    return where(is_beyond, (bits & SIGN) | INFINITY, bits)


def rounded_sum(total, terms, draw, grid, adder):
    """The running sum after all terms, each of which has `roundings` roundings, the last when it is added."""
    for index, term in enumerate(terms):
        total = add_rounded(term, total, draw((index + 1) * adder.roundings - 1), grid, adder)
    return total


def kahan_sum(total, terms, draw, grid, adder):
    """A compensated sum."""
    lost = total
    for index, term in enumerate(terms):
        first = (index + 1) * adder.roundings - 4
        total, lost = kahan_step(total, lost, term, (draw(first), draw(first + 1), draw(first + 2), draw(first + 3)), grid, adder)
    return total


def kahan_step(total, lost, term, drawn, grid, adder):
    """Add a term to a compensated sum: what an addition loses is taken off the next term, until the sum is not finite."""
    due = add_rounded(term, negated(lost), drawn[0], grid, adder)
    after = add_numbers(total, due, drawn[1], grid, adder)
    gained = add_numbers(after, negated(total), drawn[2], grid, adder)
    lost = add_numbers(gained, negated(due), drawn[3], grid, adder)
    return after, where(is_finite(bits_of(after)), lost, 0)


def tree_sum(terms, draw, grid, adder):
    """The sum of rounded terms in a balanced tree: sums wait until one of as many terms joins them, and at the end for the last."""
    each, waiting = adder.roundings, []
    for index, term in enumerate(terms):
        size, value = 1, onto_grid(term, draw((index + 1) * each - 2), grid, adder)
        waiting.append((index, size, value))
        while len(waiting) > 1 and waiting[-1][1] == waiting[-2][1]:
            join(waiting, draw, grid, adder)
    while len(waiting) > 1:
        join(waiting, draw, grid, adder)
    return waiting[0][2]


def join(waiting, draw, grid, adder):
    """Add the last two sums of a tree."""
    middle, size, right = waiting.pop()
    first, others, left = waiting.pop()
    waiting.append((first, others + size, add_numbers(left, right, draw(middle * adder.roundings - 1), grid, adder)))


def promoted_sum(total, parts, grid, adder):
    """The sum of short sums, in float32."""
    for part in parts:
        total = add_numbers(total, part, 0, grid, adder)
    return total


def add_rounded(term, x, drawn, grid, adder):
    """Add a term, an exact product or a sum of a chunk, to a number: one rounding of the exact sum."""
    return add_numbers(x, term, drawn, grid, adder)


def add_numbers(x, y, drawn, grid, adder):
    """Add two numbers: one rounding of the exact sum, which it makes no difference to round to odd first."""
    return onto_grid(add_to_odd(x, y), drawn, grid, adder)


def onto_grid(x, drawn, grid, adder):
    """A number, rounded."""
    return from_bits(round_bits(bits_of(x), drawn, grid, adder.rounding))


def largest_exponents(terms, adder):
    """The largest exponents of the terms at even and at odd places."""
    even, odd = LEAST_OF_PRODUCTS, LEAST_OF_PRODUCTS
    for term in terms[0::2]:
        even = maximum(even, term.exponent)
    for term in terms[1::2]:
        odd = maximum(odd, term.exponent)
    return even, odd


def largest_exponent(running, terms, adder):
    """The largest of the exponents of the running sum and of all terms."""
    even, odd = largest_exponents(terms, adder)
    return maximum(running, maximum(even, odd))


def truncated_sum(total, terms, unit, adder, first, every):
    """The exact sum of a running sum and every so many terms, each truncated toward zero to a multiple of 2**unit."""
    count, special = truncated(total, unit), special_sum(0, total)
    for term in terms[first::every]:
        count, special = count + truncated(term.value, unit), special_sum(special, term.value)
    return where(special == 0, number_of(count, unit), special)


def exponent_of(bits, low):
    """The exponent of a number, at least that of its format's smallest normal number, which zero has, too."""
    return maximum(minimum((bits & MAGNITUDE) >> MANTISSA, BIAS + MOST_EXPONENT) - BIAS, low)


def exponent_unless_zero(bits, low, of_zero):
    """The exponent of a number, where zero has another."""
    return where(is_zero(bits), of_zero, exponent_of(bits, low))


def significand_of(bits):
    """The significand of a finite number as an integer."""
    is_normal = (bits & MAGNITUDE) >> MANTISSA > 0
    return (bits & ((1 << MANTISSA) - 1)) | where(is_normal, 1 << MANTISSA, 0)


def normal_significand(bits):
    """The significand of a normal number as an integer."""
    return (bits & ((1 << MANTISSA) - 1)) | 1 << MANTISSA


def place_of(bits):
    """The exponent of the last bit of `significand_of`."""
    return maximum((bits & MAGNITUDE) >> MANTISSA, 1) - BIAS - MANTISSA


def truncated(bits, unit):
    """A finite number in units, truncated toward zero."""
    count = significand_of(bits) >> minimum(maximum(unit - place_of(bits), 0), MANTISSA + 1)
    return where(bits < 0, -count, count)


def rounded_down(x, unit):
    """A number, rounded down to a multiple of 2**unit."""
    significand = where(x < 0, -significand_of(x), significand_of(x))
    return where(is_finite(x), number_of(significand >> minimum(maximum(unit - place_of(x), 0), MANTISSA + 1), unit), x)


def number_of(count, unit):
    """The number that is so many units, which are at most 53 bits; zero is +0."""
    magnitude = where(count < 0, -count, count)
    length = bit_length(magnitude)
    significand = magnitude << maximum(MANTISSA + 1 - length, 0) & (1 << MANTISSA) - 1
    number = BIAS - 1 + length + unit << MANTISSA | significand
    return where(magnitude == 0, 0, where(count < 0, number | SIGN, number))


def number_to_odd(count, unit):
    """The number that is so many units, rounded to odd."""
    excess = maximum(bit_length(count) - MANTISSA - 1, 0)
    odd = count >> excess
    return number_of(odd | where(odd << excess == count, 0, 1), unit + excess)


def exact_sum(x, y):
    """The sum of two numbers, for one that 53 bits hold."""
    return add_to_odd(x, y)


def add_to_odd(x, y):
    """The sum of two numbers, rounded to odd: of its 53 bits, the last is set if they are not enough."""
    is_larger = (x & MAGNITUDE) > (y & MAGNITUDE)
    larger, smaller = where(is_larger, x, y), where(is_larger, y, x)
    shift = minimum(place_of(larger) - place_of(smaller), MANTISSA + 1 + GUARD)
    aligned = significand_of(smaller) << GUARD
    kept = aligned >> shift
    # A bit that is set for all that is shifted out stays behind the 53 bits of the sum.
    kept = kept | where(kept << shift == aligned, 0, 1)
    # The sum is not negative, which circuits know from the mask.
    count = (significand_of(larger) << GUARD) + where((larger ^ smaller) < 0, -kept, kept) & (1 << MANTISSA + GUARD + 2) - 1
    finite = number_to_odd(count, place_of(larger) - GUARD)
    finite = where(count == 0, x & y & SIGN, finite ^ (larger & SIGN))
    are_finite = is_finite(x) & is_finite(y)
    return where(are_finite, assuming(are_finite, finite), special_sum(special_sum(0, x), y))


def multiply_to_odd(x, y, unused_x, unused_y):
    """The product of two numbers that are zero or normal: exact, or rounded to odd. The last, unused bits of significands are zero."""
    sign, has_zero = (x ^ y) & SIGN, is_zero(x) | is_zero(y)
    count = (normal_significand(x) >> unused_x) * (normal_significand(y) >> unused_y)
    finite = where(has_zero, 0, number_to_odd(count, place_of(x) + place_of(y) + unused_x + unused_y)) | sign
    is_missing = is_nan(x) | is_nan(y) | has_zero
    are_finite = is_finite(x) & is_finite(y)
    return where(are_finite, assuming(are_finite, finite), where(is_missing, MAGNITUDE, INFINITY | sign))


def special_sum(special, x):
    """The infinity or NaN of a sum so far, 0 if there was none, once a number is added."""
    is_missing = is_nan(special) | is_nan(x) | (is_infinite(special) & is_infinite(x) & (special != x))
    return where(is_missing, MAGNITUDE, where(is_infinite(x), x, special))


def is_zero(bits):
    """Whether a number is zero, of either sign."""
    return bits & MAGNITUDE == 0


def is_finite(bits):
    """Whether a number is neither infinite nor NaN."""
    return bits & MAGNITUDE < INFINITY


def is_infinite(bits):
    """Whether a number is infinite."""
    return bits & MAGNITUDE == INFINITY


def positive_zero(x):
    """A number, with +0 in place of -0."""
    return where(x == SIGN, 0, x)


def negated(x):
    """A number with the other sign."""
    return x ^ SIGN
