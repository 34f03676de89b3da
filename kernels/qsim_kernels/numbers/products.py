"""Products of matrices with accumulators, as the loops for CPUs take them: 64-bit integers in a row, addresses 0 where there is nothing."""

from __future__ import annotations

from typing import Any, NamedTuple


class ProductJob(NamedTuple):
    """A product of matrices; see `numba.loops.sums`.

    Attributes:
        out: Address of the results, `[batch * rows, columns]`, float64, as all numbers.
        a: Address of the left matrices, `[batch * rows, length]`.
        b: Address of the right ones, transposed, `[batch * columns, length]`; or `[batch, length, columns]`, where each term is a product.
        exponents_a: Address of the exponents of `a`, int16, or of its groups' scales, where products are aligned.
        exponents_b: The same for `b`.
        scales_a: Address of the scales of groups of products that are added exactly.
        scales_b: The same for `b`.
        rows: The number of rows of a matrix.
        columns: The number of columns of the result.
        length: The number of products in a sum.
        group: The number of products that share scales.
        every: The number of products in a short sum; `length` for one sum that is not promoted.
        promoted: Whether the sum of short sums is float32.
        adder: Address of an `AlignedAdder` or a `TwoStepAdder`.
        rounded: Address of a `RoundedAdder`.
        seed: Of the random bits.
        stream: Which of the seed's streams.
        offset: Index of the first.
        stride: The number of random bits' indices that belong to an element; 0 if nothing is drawn.
        inner: The number of them that belong to a short sum.
        width: The number of elements of a row that are computed together.
        room: Address of room for numbers, for each part.
        words: The room of one part, in 64-bit words.
        part: Rows of a part.
    """

    out: int
    a: int
    b: int
    exponents_a: int
    exponents_b: int
    scales_a: int
    scales_b: int
    rows: int
    columns: int
    length: int
    group: int
    every: int
    promoted: int
    adder: int
    rounded: int = 0
    seed: int = 0
    stream: int = 0
    offset: int = 0
    stride: int = 0
    inner: int = 0
    width: int = 0
    room: int = 0
    words: int = 0
    part: int = 0


class AlignedAdder(NamedTuple):
    """An `AlignedSum` for the loops.

    Attributes:
        rounding: Whether running sums are rounded to nearest; otherwise toward zero.
        low: The least exponent of a running sum that is not zero.
        block: The number of products in a step.
        fraction: Bits kept below the largest exponent.
        grid: The `GridNumbers` of running sums, in float64.
    """

    rounding: int
    low: int
    block: int
    fraction: int
    grid: Any = None


class TwoStepAdder(NamedTuple):
    """A `TwoStepSum` for the loops."""

    block: int
    fraction: int
    second: int
    apart: int


class RoundedAdder(NamedTuple):
    """A `RoundedSum` for the loops.

    Attributes:
        step: Address of the loop that adds terms; see `numba.loops.doubles`.
        leaf: Address of the loop that rounds terms, for a sum in a tree.
        grid: Address of the numbers of the rounding.
        product: Address of the loop that rounds products, if they are rounded.
        product_grid: Address of its numbers.
        chunk: The number of products in a term.
        roundings: The number of roundings for each term.
        draws: How many of them a step of a running sum takes.
    """

    step: int
    leaf: int
    grid: int
    product: int
    product_grid: int
    chunk: int
    roundings: int
    draws: int
