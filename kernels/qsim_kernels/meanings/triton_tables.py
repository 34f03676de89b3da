"""Rounding onto a table in float32's bits with few loads: an override of `arithmetic.rounding.round_to_table` for Triton's blocks.

Bisection takes a load per step. Here the leading bits of a number choose a bucket, nearly always of one or two places, and a load reads two
numbers of 32 bits. Stochastic rounding compares distances by one multiplication, in units that 32 bits hold; for tables without such units,
float64's arithmetic rounds. Memory is that of `Buckets.kernel_memory`.

On an H100, rounding float32 to posit8 and takum8 went from 0.55 and 0.66 of a copy's speed to 1.00, and stochastic rounding from 0.23 to
0.91 and 0.94, to nf4 to 1.00. `test_kernels_count_distances_in_words_or_else_in_float64` and others compare results.
"""

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def round_to_table(bits, drawn, table, VARIANT: tl.constexpr):
    """Round numbers; see `arithmetic.rounding.round_to_table`.

    Args:
        bits: Their bits.
        drawn: Their random bits.
        table: The address of the memory.
        VARIANT: A `KernelVariant`; for `width`, `steps` and `table` see `values.KernelVariant`.
    """
    DRAWS: tl.constexpr = VARIANT.draws
    ROW: tl.constexpr = 1 << VARIANT.table
    pairs = table.to(tl.pointer_type(tl.int64))
    rows = pairs + (1 << 32 - VARIANT.width)
    words = (rows + (2 * ROW if DRAWS else 0)).to(tl.pointer_type(tl.int32), bitcast=True)
    place = place_of(bits ^ ((bits >> 31) & 0x7FFFFFFF), pairs, words + ROW, VARIANT)
    result = tl.load(words + place)
    if DRAWS:
        # Two factors, because one may be more than float32 holds.
        distance = tl.abs(bits.to(tl.float32, bitcast=True)) * result.to(tl.float32, bitcast=True) * 4294967296.0
        results = tl.load(rows + place)
        is_far = takes_far(distance, drawn, tl.load(rows + ROW + place))
        result = tl.where(is_far, (results >> 32).to(tl.int32), results.to(tl.int32))
    return result


@triton.jit
def place_of(key, pairs, firsts, VARIANT: tl.constexpr):
    """The last place whose first key is not above a key."""
    STEPS: tl.constexpr = VARIANT.steps
    bucket = tl.load(pairs + ((1 << 31 - VARIANT.width) + (key >> VARIANT.width)))
    place = (bucket >> 32).to(tl.int32)
    place = tl.where(key < bucket.to(tl.int32), place, place + (1 << STEPS - 1))
    for step in tl.static_range(1, STEPS):
        further = place + (1 << STEPS - 1 - step)
        place = tl.where(key < tl.load(firsts + further), place, further)
    return place


@triton.jit
def takes_far(distance, drawn, units):
    """Whether the share of the way to the far neighbour carries with the random bits.

    The way that is left, less what random bits go, must not be positive: width * drawn >= (end - distance) * 2**32.

    Args:
        distance: The distance from zero in units of 2**-32 of those of `units`.
        drawn: The random bits.
        units: The number of units at the far neighbour, behind that of the way.
    """
    if _INTERPRETED:
        # Hardware converts any number; these are for equal neighbours.
        distance = tl.where(distance < 18446744073709551616.0, distance, 0.0)
    left = (units & -0x100000000).to(tl.uint64, bitcast=True) - distance.to(tl.uint64)
    return drawn.to(tl.uint64) * (units & 0xFFFFFFFF).to(tl.uint64) >= left
