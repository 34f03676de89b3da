"""Rounding onto a grid or a table, on the bits of a number and in integers alone: exact in every mode.

A magnitude's bits, read as an integer, grow with its value and are evenly spaced within a binade. So the neighbour below is the pattern
with its low bits cleared, and adding enough to carry into the bits that are kept reaches the neighbour above. How many bits are cleared
depends on the binade alone. Below the smallest value of the grid, which is a power of two, the neighbours are that value and zero.

A mode that draws goes to the far neighbour where the share of the way, together with the random bits, is at least one. It finds that in
`raised_by` from the bits that are cleared, in `leaves_zero` from the share of the smallest value, and in `takes_far` from a table. Whatever
it does with its bits, it must not leave the far neighbour for more of them: backends leave out the last 16 where they cannot matter.
"""

from qsim_kernels.arithmetic.tables import place_of
from qsim_kernels.arithmetic.words import (
    BEHIND,
    INFINITY,
    MAGNITUDE,
    MANTISSA,
    SIGN,
    SPARE,
    carries,
    entry,
    is_nan,
    long_entry,
    maximum,
    minimum,
    to_int,
    to_long,
    to_word,
    where,
)
from qsim_kernels.numbers.grid import Mode, Overflow

NEAREST, NEAREST_AWAY, NEAREST_UP, TOWARD_ZERO, UP, DOWN, ODD, STOCHASTIC, NEAREST_DOWN, STOCHASTIC_EVEN = map(int, Mode)
NONFINITE, SATURATE, SATURATE_SYMMETRIC = map(int, Overflow)

#: Random bits are compared with distances in a table in this share of a unit, one more than are drawn: a correction is half of the last
#: one's weight.
FINE = 33
#: The number of the low bits of a distance between neighbours in a table.
LOW = 30


def round_bits(bits, drawn, grid, variant):
    """Round a number.

    Args:
        bits: Its bits.
        drawn: Its random bits, as `random_bits` returns them; only modes that draw read them.
        grid: A `GridBits`.
        variant: What is known when code is compiled: a `Variant`.

    Returns:
        The bits of the result.
    """
    if variant.table:
        return round_to_table(bits, drawn, grid.table, variant)
    else:
        return round_to_grid(bits, drawn, grid, variant)


def round_to_grid(bits, drawn, grid, variant):
    """`round_bits` onto values that are evenly spaced in each binade."""
    # NaN counts as infinity until the end, so that no sum overflows.
    magnitude = minimum(bits & MAGNITUDE, INFINITY)
    steps = cleared_bits(magnitude, grid, variant)
    rounded = ((magnitude + raised_by(magnitude, bits, steps, drawn, grid, variant)) >> steps) << steps
    if not variant.zero:
        rounded = maximum(rounded, grid.least)
    elif not variant.flat:
        below = where(leaves_zero(magnitude, bits, drawn, grid, variant), grid.least, 0)
        rounded = where(magnitude < grid.least, below, rounded)
    rounded = limited(rounded, magnitude, bits, grid, variant)
    if variant.signed and variant.keep_sign:
        result = rounded | (bits & SIGN)
    elif variant.signed:
        result = where(rounded == 0, 0, rounded | (bits & SIGN))
    else:
        result = rounded
    if variant.overflow == NONFINITE and not variant.open:
        is_missing = is_nan(bits) | (rounded > INFINITY)
    else:
        is_missing = is_nan(bits)
    return where(is_missing, MAGNITUDE, result)


def round_to_table(bits, drawn, table, variant):
    """`round_bits` onto a table, given in memory; see `arithmetic.tables`."""
    place = place_of(where(bits < 0, bits ^ MAGNITUDE, bits), table, variant)
    result = entry(table, place + (1 << variant.table))
    if variant.draws:
        far = entry(table, place + (2 << variant.table))
        result = where(takes_far(bits & MAGNITUDE, drawn, place, table, variant), far, result)
    return where(is_nan(bits), MAGNITUDE, result)


def is_negative(bits):
    """Whether a number is below zero; minus zero is not."""
    return (bits < 0) & (bits & MAGNITUDE > 0)


def cleared_bits(magnitude, grid, variant):
    """The number of low bits that are cleared: one more with each binade below the lowest that has a spacing of its own."""
    if variant.flat:
        return grid.shift
    else:
        return minimum(maximum(grid.low + grid.shift - (magnitude >> MANTISSA), grid.shift), MANTISSA)


def raised_by(magnitude, bits, steps, drawn, grid, variant):
    """The number that is added before low bits are cleared, so that the neighbour is left that the mode chooses."""
    unit = 1 << steps
    ones = unit - 1
    if variant.mode == NEAREST:
        # Half a unit less the last bit, plus the last bit of the neighbour below: a tie carries if that is odd.
        return (ones >> 1) + (((magnitude + grid.parity) >> steps) & ones & 1)
    elif variant.mode == NEAREST_AWAY:
        return unit >> 1
    elif variant.mode == NEAREST_UP:
        return where(is_negative(bits), ones, unit) >> 1
    elif variant.mode == NEAREST_DOWN:
        return where(is_negative(bits), unit, ones) >> 1
    elif variant.mode == TOWARD_ZERO:
        return 0
    elif variant.mode == UP:
        return where(is_negative(bits), 0, ones)
    elif variant.mode == DOWN:
        return where(is_negative(bits), ones, 0)
    elif variant.mode == ODD:
        return where((magnitude + grid.parity) >> steps & 1 == 0, ones, 0)
    elif variant.mode == STOCHASTIC:
        # As many random bits as are cleared: they carry as often as the number is far from the neighbour below.
        return to_int(drawn >> SPARE + 1) >> (MANTISSA - steps)
    elif variant.mode == STOCHASTIC_EVEN:
        return to_int(drawn - is_odd(drawn) >> SPARE + 1) >> (MANTISSA - steps)


def leaves_zero(magnitude, bits, drawn, grid, variant):
    """Whether a magnitude below the smallest value goes to that value instead of zero."""
    if variant.flush or variant.mode == TOWARD_ZERO:
        return magnitude < 0
    elif variant.mode == NEAREST:
        return magnitude > grid.half
    elif variant.mode == NEAREST_AWAY:
        return (magnitude >= grid.half) & (magnitude > 0)
    elif variant.mode == NEAREST_UP:
        return (magnitude > where(is_negative(bits), grid.half, grid.half - 1)) & (magnitude > 0)
    elif variant.mode == NEAREST_DOWN:
        return (magnitude > where(is_negative(bits), grid.half - 1, grid.half)) & (magnitude > 0)
    elif variant.mode == UP:
        return (bits >= 0) & (magnitude > 0)
    elif variant.mode == DOWN:
        return is_negative(bits)
    elif variant.mode == ODD:
        return magnitude > 0
    elif variant.mode == STOCHASTIC:
        return reaches(magnitude, drawn, grid)
    elif variant.mode == STOCHASTIC_EVEN:
        share, lost = share_of_least(magnitude, grid)
        return reaches(magnitude, drawn - where(share >> lost << lost == share, is_odd(drawn), 0), grid)


def reaches(magnitude, drawn, grid):
    """Whether the share of the smallest value that a magnitude is, in as many bits as are drawn, carries with the random bits."""
    share, lost = share_of_least(magnitude, grid)
    return carries(share >> lost, drawn)


def is_odd(drawn):
    """One if the last random bit is set, behind which half of its weight is: `STOCHASTIC_EVEN` withholds the last bit then, or zero.

    Shares are rounded to as many bits as are drawn. With half of the last one's weight a tie goes up. With an odd integer it goes to the
    far neighbour only if its sum is exactly one, and then the share in front of the tie is even: it had to go down.
    """
    integer = drawn & (drawn - 1)
    return where(integer & ((drawn ^ integer) << 1) == 0, 0, 1)


def share_of_least(magnitude, grid):
    """The share of the smallest value that a magnitude is: a word, and the number of its last bits that are lost."""
    field, lowest = magnitude >> MANTISSA, grid.least >> MANTISSA
    # Shares below the last random bit are zero: without its leading one, a significand leaves nothing after the longest shift of a word.
    # Zero has none either, which narrow carriers hold next to the smallest values.
    has_leading = (field > lowest - (SPARE + MANTISSA + 2)) & (field > 0)
    significand = (magnitude & ((1 << MANTISSA) - 1)) | where(has_leading, 1 << MANTISSA, 0)
    binades = lowest - maximum(field, 1)
    return to_word(significand) << SPARE, minimum(maximum(binades - 1, 0), SPARE + MANTISSA)


def takes_far(magnitude, drawn, place, table, variant):
    """Whether the share of the way to the far neighbour, in as many bits as are drawn, carries with the random bits.

    In integers: the distance from the near neighbour, in units of 2**-33, is at least that between both times what the bits lack to 2**33.
    """
    whole, rest, lost = in_units(to_long(magnitude), long_entry(table, place + (4 << variant.table)))
    fraction = rest >> lost
    distance = whole + long_entry(table, place + (3 << variant.table))
    lacking = (1 << FINE) - (to_long(drawn) << 1 >> BEHIND)
    product = lacking * long_entry(table, place + (6 << variant.table))
    least = lacking * long_entry(table, place + (5 << variant.table)) + (product >> LOW)
    due = product & ((1 << LOW) - 1)
    if variant.mode == STOCHASTIC_EVEN:
        due = due + where(fraction << lost == rest, is_odd(drawn), 0)
    is_short = (fraction & ((1 << LOW) - 1)) < due
    return (distance << FINE - LOW) + (fraction >> LOW) - where(is_short, 1, 0) >= least


def in_units(magnitude, unit):
    """A magnitude in whole units, the rest in units of 2**-33, and the number of its last bits that are lost; far beyond a table, any."""
    field = magnitude >> MANTISSA
    significand = (magnitude & ((1 << MANTISSA) - 1)) | where(field > 0, 1 << MANTISSA, 0)
    lift = maximum(field, 1) - unit
    sink = maximum(unit - maximum(field, 1), 0)
    down = minimum(sink, MANTISSA + 1)
    whole = significand << minimum(maximum(lift, 0), 58 - MANTISSA) >> down
    rest = significand & ((1 << down) - 1)
    return whole, rest << maximum(FINE - sink, 0), minimum(maximum(sink - FINE, 0), MANTISSA + 1)


def limited(rounded, magnitude, bits, grid, variant):
    """Replace a magnitude beyond the largest value: by that value, or by an infinity or NaN if the rounding leads outward."""
    if variant.signed and (variant.overflow == SATURATE_SYMMETRIC or (variant.overflow == SATURATE and variant.symmetric)):
        return minimum(rounded, grid.top)
    elif variant.open:
        # The pattern above the largest value is that of infinity.
        return rounded
    else:
        negative = is_negative(bits)
        largest = where(negative, grid.bottom, grid.top)
        return where(rounded > largest, beyond(magnitude, negative, grid, variant), rounded)


def beyond(magnitude, negative, grid, variant):
    """The result of an overflow."""
    is_infinite = magnitude == INFINITY
    if variant.overflow != NONFINITE:
        return where(negative, grid.floor, grid.top)
    elif variant.mode == TOWARD_ZERO:
        return where(is_infinite, where(negative, grid.under, grid.over), where(negative, grid.floor, grid.top))
    elif variant.mode == UP:
        return where(negative, where(is_infinite, grid.under, grid.floor), grid.over)
    elif variant.mode == DOWN:
        return where(negative, grid.under, where(is_infinite, grid.over, grid.top))
    else:
        return where(negative, grid.under, grid.over)


def random_bits(word, used):
    """The random bits that a rounding uses of 32 drawn ones, and half of the last one's weight if the rule has a correction.

    Args:
        word: The drawn bits.
        used: A `UsedBits`.
    """
    return ((word & used.keep) << BEHIND) | used.correction
