"""Rounding onto a table, in integers alone: bisection of the places where results change, and exact distances for stochastic rounding.

A table in memory is what `numbers.places.memory_of` returns: rows of `1 << variant.table` numbers of 64 bits, the fields of `TablePlace`.
"""

from qsim_kernels.arithmetic.words import (
    BEHIND,
    MAGNITUDE,
    MANTISSA,
    entry,
    is_nan,
    long_entry,
    maximum,
    minimum,
    to_long,
    unrolled,
    where,
)
from qsim_kernels.numbers.grid import Mode

STOCHASTIC = int(Mode.STOCHASTIC)

#: Random bits are compared with distances in this share of a unit, one more than are drawn: a correction is half of the last one's weight.
FINE = 33
#: Those of a table with as many places as 16 bits have codes, and five where numbers overflow.
MOST_STEPS = 17
#: The number of the low bits of a distance between neighbours.
LOW = 30


def round_to_table(bits, drawn, table, variant):
    """Round a number; see `arithmetic.rounding.round_bits`.

    Args:
        bits: Its bits.
        drawn: Its random bits.
        table: The table in memory.
        variant: A `Variant`.
    """
    place = place_of(where(bits < 0, bits ^ MAGNITUDE, bits), table, variant)
    result = entry(table, place + (1 << variant.table))
    if variant.mode == STOCHASTIC:
        far = entry(table, place + (2 << variant.table))
        result = where(takes_far(bits & MAGNITUDE, drawn, place, table, variant), far, result)
    return where(is_nan(bits), MAGNITUDE, result)


def place_of(key, table, variant):
    """The last place whose first number is not above a number."""
    place = key & 0
    for step in unrolled(MOST_STEPS):
        if step < variant.table:
            further = place + (1 << variant.table - 1 - step)
            place = where(key < entry(table, further), place, further)
    return place


def takes_far(magnitude, drawn, place, table, variant):
    """Whether the share of the way to the far neighbour, in as many bits as are drawn, carries with the random bits.

    In integers: the distance from the near neighbour, in units of 2**-33, is at least that between both times what the bits lack to 2**33.
    """
    whole, fraction = in_units(to_long(magnitude), long_entry(table, place + (4 << variant.table)))
    distance = whole + long_entry(table, place + (3 << variant.table))
    lacking = (1 << FINE) - (to_long(drawn) << 1 >> BEHIND)
    product = lacking * long_entry(table, place + (6 << variant.table))
    least = lacking * long_entry(table, place + (5 << variant.table)) + (product >> LOW)
    is_short = (fraction & ((1 << LOW) - 1)) < (product & ((1 << LOW) - 1))
    return (distance << FINE - LOW) + (fraction >> LOW) - where(is_short, 1, 0) >= least


def in_units(magnitude, unit):
    """A magnitude in whole units and the rest in units of 2**-33, without what is below; far beyond a table, any large number."""
    field = magnitude >> MANTISSA
    significand = (magnitude & ((1 << MANTISSA) - 1)) | where(field > 0, 1 << MANTISSA, 0)
    lift = maximum(field, 1) - unit
    sink = maximum(unit - maximum(field, 1), 0)
    down = minimum(sink, MANTISSA + 1)
    whole = significand << minimum(maximum(lift, 0), 58 - MANTISSA) >> down
    rest = significand & ((1 << down) - 1)
    return whole, rest << maximum(FINE - sink, 0) >> minimum(maximum(sink - FINE, 0), MANTISSA + 1)
