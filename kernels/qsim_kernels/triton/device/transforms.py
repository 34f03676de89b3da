"""Hadamard transforms of blocks of bfloat16 values that a thread holds, and the largest magnitudes of their results.

All sums of a block are a thread's own, so that it needs neither shared memory nor other threads.
"""

# mypy: disable-error-code="assignment"
# (Triton unrolls loops in which a tuple grows.)

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.triton.device.blocks import larger
from qsim_kernels.triton.device.regions import piece_factors


@triton.jit
def pairs_of_rows(x, columns, inside, ROWS: tl.constexpr, filled=None):
    """Load the pairs of a column of pairs, a tuple; zeros where there are fewer rows."""
    pairs = ()
    for row in tl.static_range(ROWS):
        pairs += (tl.load(x, mask=exists(row, inside, filled), other=0),)
        x += columns
    return pairs


@triton.jit
def exists(row, inside, filled):
    """Whether the pairs of a row exist."""
    return inside if filled is None else inside & (row < filled)


@triton.jit
def flips_of(signs, PAIRS: tl.constexpr):
    """The sign bits to flip in pairs, given the number that `partition.pair_signs` makes of a transform's signs."""
    flips = ()
    for i in tl.static_range(PAIRS):
        flips += (((signs.to(tl.int64) >> (i // 16 * 32)).to(tl.int32) << (15 - i % 16)) & -0x7FFF8000,)
    return flips


@triton.jit
def singles(pairs, flips, HALF: tl.constexpr):
    """The first or the second elements of pairs as float32, some with their signs flipped."""
    values = ()
    for i in tl.static_range(len(pairs)):
        pair = pairs[i] ^ flips[i]
        values += (((pair & -0x10000) if HALF else (pair << 16)).to(tl.float32, bitcast=True),)
    return values


@triton.jit
def bounded(values, LARGEST: tl.constexpr):
    """Values whose magnitudes are at most a number unless they are infinite."""
    result = ()
    for i in tl.static_range(len(values)):
        x = values[i]
        result += (tl.where(tl.abs(x) < float("inf"), tl.maximum(tl.minimum(x, LARGEST), -LARGEST), x),)
    return result


@triton.jit
def summed(values, SIZE: tl.constexpr):
    """The sums and differences of blocks of a size in the order of `arithmetic.hadamard`."""
    for level in tl.static_range(5):
        if 1 << level < SIZE:
            sums = ()
            for i in tl.static_range(len(values)):
                if i & (1 << level):
                    sums += (values[i - (1 << level)] - values[i],)
                else:
                    sums += (values[i] + values[i + (1 << level)],)
            values = sums
    return values


@triton.jit
def transformed(values, factor):
    """The transform of a block."""
    sums = summed(values, len(values))
    result = ()
    for i in tl.static_range(len(values)):
        result += (sums[i] * factor,)
    return result


@triton.jit
def cut(values, filled):
    """The transform of the rows of a block that exist, in powers of two; see `regions.transformed`."""
    for level in tl.static_range(5):
        if 1 << level < len(values):
            sums = ()
            for i in tl.static_range(len(values)):
                if i & (1 << level):
                    joined = values[i - (1 << level)] - values[i]
                else:
                    joined = values[i] + values[i + (1 << level)]
                sums += (tl.where((((i >> (level + 1)) + 1) << (level + 1)) <= filled, joined, values[i]),)
            values = sums
    result = ()
    for i in tl.static_range(len(values)):
        result += (values[i] * piece_factors(i, filled, 5),)
    return result


@triton.jit
def transformed_rows(values, filled, factor):
    """The transform of a block of which some rows exist, or all."""
    if filled is None:
        values = transformed(values, factor)
    else:
        if filled < len(values):
            values = cut(values, filled)
        else:
            values = transformed(values, factor)
    return values


@triton.jit
def largest_of(values):
    """The largest of magnitudes, NaN if one is, as patterns."""
    result = tl.abs(values[0])
    for i in tl.static_range(1, len(values)):
        result = larger(result, tl.abs(values[i]))
    return result.to(tl.int32, bitcast=True)


@triton.jit
def largest_transformed(values):
    """The largest magnitude of a block's transform without its factor, as patterns; not finite if a value is not."""
    HALF: tl.constexpr = len(values) // 2
    halves = summed(values, HALF)
    sums = ()
    for i in tl.static_range(HALF):
        # The larger magnitude of a + b and a - b.
        sums += (tl.abs(halves[i]) + tl.abs(halves[i + HALF]),)
    return largest_of(sums)


@triton.jit
def finite_patterns(values):
    """The largest magnitude of those values that are finite, as a pattern."""
    largest = tl.zeros_like(values[0].to(tl.int32, bitcast=True))
    for i in tl.static_range(len(values)):
        bits = values[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.where(bits < 0x7F800000, bits, 0))
    return largest


@triton.jit
def largest_sum(
    x, row, blocks, columns, inside, signs, filled, FACTOR: tl.constexpr,
    TURN: tl.constexpr, FINITE: tl.constexpr, STEPS: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of a transform, as a pattern.

    Args:
        x: Pointers to the first pairs of columns.
        row: The first block of rows.
        blocks: The number of blocks of rows.
        columns: The pairs of a row.
        inside: Which pairs of columns exist.
        signs: The signs of a transform.
        filled: The number of rows of a block that exist; `None` for all.
        FACTOR: The factor of whole blocks.
        TURN: The `TurnVariant`.
        FINITE: Whether to ignore non-finite values, if `CAREFUL`.
        STEPS: The number of blocks of a thread.
        CAREFUL: Whether to saturate numbers whose sums could overflow.
    """
    SIZE: tl.constexpr = 1 << TURN.levels
    flips = flips_of(signs, SIZE)
    largest = tl.zeros(inside.shape, tl.int32)
    for step in range(STEPS):
        pairs = pairs_of_rows(x + (row + step) * SIZE * columns, columns, inside & (row + step < blocks), SIZE, filled)
        for half in tl.static_range(2):
            values = singles(pairs, flips, half)
            if CAREFUL:
                values = transformed_rows(bounded(values, 3.4028234663852886e38 / SIZE), filled, FACTOR)
                largest = tl.maximum(largest, finite_patterns(values) if FINITE else largest_of(values))
            elif filled is None:
                largest = tl.maximum(largest, largest_transformed(values))
            else:
                largest = tl.maximum(largest, largest_of(transformed_rows(values, filled, FACTOR)))
    return tl.max(largest, axis=0)


@triton.jit
def careful_from(TURN: tl.constexpr, FACTOR: tl.constexpr):
    """The pattern of transformed magnitudes, given their factor, from which on numbers may be so large that their sums could overflow.

    A sum is at least as large as the largest of its terms, up to its own rounding.
    """
    LIMIT: tl.constexpr = 3.4028234663852886e38 / (1 << TURN.levels) * 0.99 * FACTOR
    return tl.full([], LIMIT, tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def largest_of_transform(
    x, row, blocks, columns, inside, signs, TURN: tl.constexpr, FINITE: tl.constexpr, STEPS: tl.constexpr, filled=None
):  # fmt: skip
    """`largest_sum` with the factor of the transform, careful only where numbers are large, which is rare: then they are read again."""
    # Whole blocks have one factor; no piece of another has a smaller one.
    FACTOR: tl.constexpr = 1.0 if filled is None else TURN.factor
    amax = largest_sum(x, row, blocks, columns, inside, signs, filled, FACTOR, TURN, FINITE, STEPS, False)
    if amax >= careful_from(TURN, FACTOR):
        amax = largest_sum(x, row, blocks, columns, inside, signs, filled, FACTOR, TURN, FINITE, STEPS, True)
    if filled is None:
        amax = (amax.to(tl.float32, bitcast=True) * TURN.factor).to(tl.int32, bitcast=True)
    return amax


@triton.jit
def write_ahead(out, x, row, pair, columns, signs, TURN: tl.constexpr, PAIRS: tl.constexpr):
    """Write the largest finite magnitude of transformed rows, of so many pairs of columns, while a program rounds them untransformed.

    It reads them again, from its cache: no arrangement in threads suits both blocks along rows and transforms along columns.
    """
    pair += tl.arange(0, PAIRS)
    source = x.to(tl.pointer_type(tl.int32)) + row * columns + pair
    amax = largest_of_transform(source, 0, 1, columns.to(tl.int32), pair < columns, signs, TURN, True, 1)
    tl.store(out.to(tl.pointer_type(tl.int32)) + tl.program_id(0), amax)
