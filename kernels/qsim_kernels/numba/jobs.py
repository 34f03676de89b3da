"""Jobs: the numbers of a call as the loops take them, 64-bit integers in a row. Addresses are 0 where there is nothing."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple


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


class Values(NamedTuple):
    """Rounding to values; see `loops.values`.

    Attributes:
        out: Address of the results, which may be that of the values.
        x: Address of the values.
        out_is_narrow: Whether results are bfloat16, not float32.
        x_is_narrow: The same for values.
        strip: Address of the loop that rounds a strip.
        how: Address of its numbers.
        seed: See `loops.strips`.
        stream: See `loops.strips`.
        offset: Logical index of the first element.
    """

    out: int
    x: int
    out_is_narrow: int
    x_is_narrow: int
    strip: int
    how: int
    seed: int
    stream: int
    offset: int


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
        x: Address of the elements.
        rounded: Address of the rounded elements.
        size: Number of elements.
        x_is_narrow: Whether elements are bfloat16, not float32.
        rounded_is_narrow: The same for rounded elements.
        low: The bits of the smallest value of the grid, as float64.
        high: Those of the largest.
    """

    counts: int
    sums: int
    x: int
    rounded: int
    size: int
    x_is_narrow: int
    rounded_is_narrow: int
    low: int
    high: int


class Transform(NamedTuple):
    """Hadamard transforms of matrices in place, along their first dimension; see `loops.hadamard`.

    Attributes:
        x: Address of the matrices.
        length: Rows of a matrix.
        inner: Columns of a matrix.
        is_joined: Whether consecutive matrices are one long matrix.
        signs: Address of the signs of a block's elements, float32.
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


class Job(NamedTuple):
    """Rounding under scales; see `loops.tiles`.

    Attributes:
        loop: Address of the loop that some rows go through.
        out: Address of the results.
        x: Address of the values.
        factors: Address of what results are multiplied by, or 0.
        divisors: Address of what values are divided by: scales, times that of the whole tensor.
        scales: Address of the largest magnitudes, and of the scales that replace them.
        matrices: Number of matrices.
        rows: See `scales.TileSizes`.
        columns: See `scales.TileSizes`.
        height: See `scales.TileSizes`.
        width: See `scales.TileSizes`.
        across: See `scales.TileSizes`.
        out_is_narrow: Whether results are bfloat16, not float32.
        x_is_narrow: The same for values.
        strip: Address of the loop that rounds a strip.
        how: Address of its numbers.
        seed: See `loops.strips`.
        stream: See `loops.strips`.
        making: Address of the job that makes scales.
        under: Bits of the float32 scale of the whole tensor.
        counted: Bits of the largest magnitude that is not ignored.
        offset: Logical index of the first element.
        most: Bits of the largest magnitude of a result.
        finding: Address of the loop that finds the largest magnitudes.
        scaling: Address of the loop that makes scales of them.
        rounding: Address of the loop that rounds under scales.
        by_tiles: Whether there is only one row, whose tiles threads share.
        leaves_zero: See `grid.Rule`.
    """

    loop: int = 0
    out: int = 0
    x: int = 0
    factors: int = 0
    divisors: int = 0
    scales: int = 0
    matrices: int = 0
    rows: int = 0
    columns: int = 0
    height: int = 0
    width: int = 0
    across: int = 0
    out_is_narrow: int = 0
    x_is_narrow: int = 0
    strip: int = 0
    how: int = 0
    seed: int = 0
    stream: int = 0
    making: int = 0
    under: int = 0
    counted: int = 0
    offset: int = 0
    most: int = 0
    finding: int = 0
    scaling: int = 0
    rounding: int = 0
    by_tiles: int = 0
    leaves_zero: int = 0


class Update(NamedTuple):
    """One step for one parameter; see `loops.updates`.

    Attributes:
        param: Address of the parameter.
        grad: Address of the gradient.
        first: Address of the first moments.
        second: Address of the second moments.
        largest: Address of the largest second moments.
        compensation: Address of the compensation, which has the parameter's dtype.
        param_is_narrow: Whether parameters are bfloat16, not float32.
        grad_is_narrow: The same for gradients.
        state_is_narrow: The same for moments.
        flags: 1 to step along the gradient, 2 to add the decay to the gradient, 4 to add it to the update.
        scale: The bits of a float32, as the following ones; see `qsim_kernels.numbers.updates.Factors`.
        offset: Logical index of the first element.
        row: The number of elements with consecutive indices; 0 if all have.
        stride: The distance from the index of one row's first element to that of the next.
        param_strip: Address of the loop that rounds weights.
        param_how: Address of its numbers.
        param_masks: Whether infinities become NaN first; the same three follow for compensations (`inner`) and for moments (`state`).
        param_seed: The seed of the weights' random bits.
        param_stream: Their stream; the same two follow for first and second moments.
    """

    param: int
    grad: int
    first: int
    second: int
    largest: int
    compensation: int
    param_is_narrow: int
    grad_is_narrow: int
    state_is_narrow: int
    flags: int
    scale: int
    keep1: int
    fresh1: int
    keep2: int
    fresh2: int
    rate: int
    root: int
    mean: int
    epsilon: int
    decay: int
    offset: int
    row: int
    stride: int
    param_strip: int
    param_how: int
    param_masks: int
    inner_strip: int
    inner_how: int
    inner_masks: int
    state_strip: int
    state_how: int
    state_masks: int
    param_seed: int
    param_stream: int
    first_seed: int
    first_stream: int
    second_seed: int
    second_stream: int


#: A `Values` in memory, given its numbers: small tensors need it often.
pack_values = struct.Struct(f"{len(Values._fields)}q").pack


def packed(job: tuple[int, ...]) -> bytes:
    """A job in memory, as `Loop.run` takes it."""
    return struct.pack(f"{len(job)}q", *job)


def job_address(job: bytes) -> int:
    """The address of a job that a loop passes to another, valid as long as the job is kept."""
    return ctypes.cast(ctypes.c_char_p(job), ctypes.c_void_p).value or 0


def kept_address(numbers: tuple[int, ...]) -> int:
    """The address of numbers in memory that is never freed, because other jobs refer to it."""
    return job_address(_kept.setdefault(numbers, packed(numbers)))


# No cache of a function: where two threads ask first, that frees the memory which one of them got.
_kept: dict[tuple[int, ...], bytes] = {}


def stored(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Numbers in memory that compiled code may change; `ctypes.addressof` gives their address, as long as they are kept."""
    return (ctypes.c_int64 * len(numbers))(*numbers)
