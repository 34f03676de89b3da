"""Places of a table in memory: bisection of the numbers at which results change.

A table in memory is what `numbers.places.memory_of` returns: rows of `1 << variant.table` numbers of 64 bits, the fields of `TablePlace`.
"""

from qsim_kernels.arithmetic.words import entry, unrolled, where

#: Those of a table with as many places as 16 bits have codes, and five where numbers overflow.
MOST_STEPS = 17


def place_of(key, table, variant):
    """The last place whose first number is not above a number."""
    place = key & 0
    for step in unrolled(MOST_STEPS):
        if step < variant.table:
            further = place + (1 << variant.table - 1 - step)
            place = where(key < entry(table, further), place, further)
    return place
