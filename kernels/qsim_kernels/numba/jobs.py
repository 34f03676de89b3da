"""Jobs: records of a call's numbers as the loops take them, and these records in memory. Addresses are 0 where there is nothing.

In memory, a job has 64 bits for each of its numbers, and of those of the records in it, in a row; `loops.bits.record_at` reads them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

from qsim_kernels.numbers.carrier import GridNumbers, RoundingNumbers
from qsim_kernels.numbers.grid import NoiseNumbers
from qsim_kernels.numbers.scales import ScaleNumbers, TileSizes
from qsim_kernels.numbers.updates import Factors, PlaceNumbers, UpdateTensors, UpdateVariant

#: How the name of a loop in which floats round begins.
IN_FLOATS = "in_floats_"
#: The most elements of a strip, which stays in the nearest cache; and blocks that a Hadamard transform works on at once.
STRIP, LANES = 512, 64
#: The most elements of a row whose rounded sums are computed together; and sums of a tree that wait for one of as many terms: one for each
#: bit of the number of terms.
WIDTH, WAITING = 128, 64
#: Rows of numbers in the room of `loops.sums.rounded`: terms, results, losses, and four of random bits; then sums that wait.
ROWS = 7 + WAITING


class LoneLoop(NamedTuple):
    """A loop that one thread runs as a whole; its job follows in memory.

    Attributes:
        loop: Address of the loop.
        end: The number of elements.
    """

    loop: int
    end: int


class SharedLoop(NamedTuple):
    """A loop that threads share; see `loops.shares`.

    Attributes:
        start: The first element that no thread has taken.
        part: The number of elements that a thread takes.
        end: The number of elements.
        loop: Address of the loop.
        job: Address of its job.
    """

    start: int
    part: int
    end: int
    loop: int
    job: int


class StoredValues(NamedTuple):
    """Values in memory.

    Attributes:
        at: Their address.
        is_narrow: Whether they are bfloat16, not float32.
    """

    at: int
    is_narrow: int


class LoopRounding(NamedTuple):
    """A rounding as the loops take it.

    Attributes:
        loop: Address of the loop that rounds a strip or a row.
        grid: Address of its `StripNumbers`.
    """

    loop: int
    grid: int


class Values(NamedTuple):
    """Rounding to values; see `loops.values`.

    Attributes:
        out: The results, which may be the values.
        x: The values.
        strip: The rounding of a strip.
        noise: The random bits.
    """

    out: StoredValues
    x: StoredValues
    strip: LoopRounding
    noise: NoiseNumbers


class EncodedValues(NamedTuple):
    """Rounding to codes; see `loops.values`.

    Attributes:
        out: Address of the codes, of 8 bits.
        table: Address of the code of each bfloat16 number.
        lost: Address of a number that becomes 1 where the result is NaN, or 0 if it is not asked for.
        x: The values.
        strip: The rounding of a strip.
        noise: The random bits.
    """

    out: int
    table: int
    lost: int
    x: StoredValues
    strip: LoopRounding
    noise: NoiseNumbers


class LookUp(NamedTuple):
    """Looking up unsigned indices in a table; see `loops.tables`.

    Attributes:
        out: Address of the results.
        indices: Address of the indices.
        table: Address of the table.
        entry_size: Bytes of an entry.
        index_size: Bytes of an index.
    """

    out: int
    indices: int
    table: int
    entry_size: int
    index_size: int


class Outcomes(NamedTuple):
    """Counting and summing rounding outcomes; see `loops.tally`.

    Attributes:
        counts: Address of the counts.
        sums: Address of the sums, two for each strip.
        x: The elements.
        rounded: The rounded elements.
        size: Number of elements.
        low: The smallest value of the grid.
        high: The largest value of the grid.
    """

    counts: int
    sums: int
    x: StoredValues
    rounded: StoredValues
    size: int
    low: float
    high: float


class Summands(NamedTuple):
    """The elements of a checksum; see `loops.checksum`.

    Attributes:
        sum: Address of the sum.
        x: Address of the elements.
        size: Their number.
        is_narrow: Whether they have 16 bits, not 32.
        offset: The index of the first element in the whole tensor.
        row: The number of elements with consecutive indices.
        stride: The distance from the index of one row's first element to that of the next.
    """

    sum: int
    x: int
    size: int
    is_narrow: int
    offset: int
    row: int
    stride: int


class Transform(NamedTuple):
    """Hadamard transforms of matrices in place, along their first dimension; see `loops.hadamard`.

    Attributes:
        x: Address of the matrices.
        length: Rows of a matrix.
        inner: Columns of a matrix.
        is_joined: Whether consecutive matrices are one long matrix.
        signs: Address of what flips the signs of a block's elements, int32.
        norms: Address of the last factors of blocks of 1, 2, 4 … elements, float32.
        powers: The number of these factors; the last is that of whole blocks.
        largest: The bits of the largest magnitude that a block may hold.
        lanes: Address of room for `LANES` blocks for each part.
        part: Matrices of a part.
    """

    x: int
    length: int
    inner: int
    is_joined: int
    signs: int
    norms: int
    powers: int
    largest: int
    lanes: int
    part: int


class ScalesJob(NamedTuple):
    """Scales from largest magnitudes; see `loops.scales`.

    Attributes:
        out: Address of the scales, which may be that of the magnitudes.
        amaxes: Address of the largest magnitudes.
        whole: The scale of the whole tensor, or 1.
        numbers: The numbers from which scales are computed.
    """

    out: int
    amaxes: int
    whole: float
    numbers: ScaleNumbers


class TilesJob(NamedTuple):
    """Rounding under scales; see `loops.tiles`.

    Attributes:
        x: The values.
        matrices: Number of matrices.
        tiles: Which elements share a scale.
        loop: Address of the loop that some rows go through.
        by_tiles: Whether there is only one row, whose tiles threads share.
        scales: Address of the largest magnitudes, and of the scales that replace them.
        finite: Bits of the largest magnitude that counts.
        out: The results.
        factors: Address of what results are multiplied by, or 0.
        divisors: Address of what values are divided by: scales, times that of the whole tensor.
        strip: The rounding of a strip.
        noise: The random bits.
        limit: Bits of the largest magnitude of a result.
        leaves_zero: See `grid.Rule`.
        whole: Bits of the float32 scale of the whole tensor.
        amaxes_loop: Address of the loop that finds the largest magnitudes.
        scales_loop: Address of the loop that makes scales of them.
        scales_job: Address of its job.
        rows_loop: Address of the loop that rounds under scales.
    """

    x: StoredValues
    matrices: int
    tiles: TileSizes
    loop: int = 0
    by_tiles: int = 0
    scales: int = 0
    finite: int = 0
    out: StoredValues = StoredValues(0, 0)
    factors: int = 0
    divisors: int = 0
    strip: LoopRounding = LoopRounding(0, 0)
    noise: NoiseNumbers = NoiseNumbers(0, 0, 0)
    limit: int = 0
    leaves_zero: int = 0
    whole: int = 0
    amaxes_loop: int = 0
    scales_loop: int = 0
    scales_job: int = 0
    rows_loop: int = 0


class StripNumbers(NamedTuple):
    """The numbers of a rounding of strips.

    Attributes:
        rounding: Those of any rounding.
        is_short: Whether 16 random bits suffice.
        buckets: Address of a table's buckets, or 0.
    """

    rounding: RoundingNumbers
    is_short: int
    buckets: int


class StoredRounding(NamedTuple):
    """The rounding of numbers that an update stores.

    Attributes:
        rounding: The rounding.
        masks: Whether infinities become NaN first.
    """

    rounding: LoopRounding
    masks: int


class UpdateKeys(NamedTuple):
    """The seeds and streams of a step's random bits."""

    weights: NoiseNumbers
    first: NoiseNumbers
    second: NoiseNumbers


class UpdateJob(NamedTuple):
    """One step for one parameter; see `loops.updates`.

    Attributes:
        at: Addresses of the tensors; the compensation has the parameter's dtype.
        param_is_narrow: Whether parameters are bfloat16, not float32.
        grad_is_narrow: The same for gradients.
        state_is_narrow: The same for moments.
        variant: The facts of the update.
        factors: The numbers of the step.
        place: Where the elements are in the whole tensor.
        weights: The rounding of weights.
        compensations: The rounding of compensations.
        moments: The rounding of moments.
        keys: The keys of its random bits.
    """

    at: UpdateTensors
    param_is_narrow: int
    grad_is_narrow: int
    state_is_narrow: int
    variant: UpdateVariant
    factors: Factors
    place: PlaceNumbers
    weights: StoredRounding
    compensations: StoredRounding
    moments: StoredRounding
    keys: UpdateKeys


class OperandAddresses(NamedTuple):
    """An operand of a product in memory.

    Attributes:
        values: Address of its float64 values.
        exponents: Address of their exponents, int16, or of its groups' scales', where products are aligned.
        scales: Address of the scales of groups of products that are added exactly.
    """

    values: int
    exponents: int
    scales: int


class ProductJob(NamedTuple):
    """A product of matrices; see `numba.loops.sums`.

    Attributes:
        out: Address of the results, `[batch * rows, columns]`, float64, as all numbers.
        a: The left matrices, `[batch * rows, length]`.
        b: The right ones, transposed, `[batch * columns, length]`; or `[batch, length, columns]`, where each term is a product.
        rows: The number of rows of a matrix.
        columns: The number of columns of the result.
        length: The number of products in a sum.
        group: The number of products that share scales.
        every: The number of products in a short sum; `length` for one sum that is not promoted.
        promoted: Whether the sum of short sums is float32.
        adder: Address of an `AlignedAdder` or a `TwoStepAdder`.
        rounded: Address of a `RoundedAdder`.
        noise: The random bits.
        stride: The number of random bits' indices that belong to an element; 0 if nothing is drawn.
        inner: The number of them that belong to a short sum.
        width: The number of elements of a row that are computed together.
        room: Address of room for numbers, for each part.
        words: The room of one part, in 64-bit words.
        part: Rows of a part.
    """

    out: int
    a: OperandAddresses
    b: OperandAddresses
    rows: int
    columns: int
    length: int
    group: int
    every: int
    promoted: int
    adder: int
    rounded: int = 0
    noise: NoiseNumbers = NoiseNumbers(0, 0, 0)
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
        grid: The values of running sums, in float64's bits.
    """

    rounding: int
    low: int
    block: int
    fraction: int
    grid: GridNumbers


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


def packed(job: tuple[Any, ...]) -> bytes:
    """A job in memory, as `Loop.share` takes it."""
    return _packing(type(job))(job)


@cache
def _packing(kind: type) -> Callable[[tuple[Any, ...]], bytes]:
    """A function that packs a record."""
    layout, paths = layout_of(kind), [path for path, _ in _numbers(kind)]
    if paths == list(get_type_hints(kind)):
        return lambda job: layout.pack(*job)
    numbers = attrgetter(*paths)
    return lambda job: layout.pack(*numbers(job))


def layout_of(kind: type) -> struct.Struct:
    """The numbers of a record in memory: floats where they are annotated as such, and integers."""
    return struct.Struct("".join(letter for _, letter in _numbers(kind)))


def _numbers(kind: Any) -> Iterator[tuple[str, str]]:
    """The numbers of a record, and of the records in it, as attributes of attributes, and the letters of their types."""
    for name, hint in get_type_hints(kind).items():
        if hasattr(hint, "_fields"):
            yield from ((f"{name}.{path}", letter) for path, letter in _numbers(hint))
        else:
            yield name, "d" if hint is float else "q"


def job_address(job: bytes) -> int:
    """The address of a job that a loop passes to another, valid as long as the job is kept."""
    return ctypes.cast(ctypes.c_char_p(job), ctypes.c_void_p).value or 0


def kept_address(job: tuple[Any, ...]) -> int:
    """The address of a job in memory that is never freed, because other jobs refer to it."""
    return job_address(_kept.setdefault(numbers := packed(job), numbers))


# No cache of a function: where two threads ask first, that frees the memory which one of them got.
_kept: dict[bytes, bytes] = {}


def changeable(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Numbers in memory that compiled code may change; `ctypes.addressof` gives their address, as long as they are kept."""
    return (ctypes.c_int64 * len(numbers))(*numbers)
