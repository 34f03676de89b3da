"""Running sums of chunks: each chunk is the sum of an H100's matrix unit, and the running sum is rounded after each; see `RoundedSum`.

On that unit `chunked_kernel` lets `tl.dot` compute the chunks, which gives the defined numbers because it is the unit that defines them.
Everywhere else `chained_kernel` emulates the unit.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import RoundingNumbers
from qsim_kernels.triton.accumulate.aligned import aligned_sum, store_sums, terms_behind, zeros
from qsim_kernels.triton.accumulate.planes import first_terms
from qsim_kernels.triton.accumulate.rounded_sums import RandomNumbers, add_term, first_blocks
from qsim_kernels.triton.device.blocks import with_one_nan
from qsim_kernels.triton.device.noise import LATE_BLOCKS, words
from qsim_kernels.triton.device.parts import swizzled
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.values import rounding_of


class ChunkVariant(NamedTuple):
    """How the chip computes chunks.

    Attributes:
        chunk: The number of products in a chunk.
        step: The number of products that are loaded at a time.
        group: The number of rows of tiles that programs work on at the same time.
        even: Whether sizes are multiples of a tile's.
    """

    chunk: int
    step: int
    group: int
    even: bool


@triton.jit
def random_integer(noise, blocks, index):
    """The 32 random bits of one rounding of each element.

    Args:
        noise: A `Noise`.
        blocks: The number of each element's first Philox block.
        index: The rounding's index, the same for all.
    """
    place = index % 8
    a, b, c, d = words(blocks + index // 8, noise.seed, noise.stream)
    e, f, g, h = words((blocks + index // 8) | LATE_BLOCKS, noise.seed, noise.stream)
    first = tl.where(place < 4, tl.where(place < 2, a, b), tl.where(place < 6, c, d))
    last = tl.where(place < 4, tl.where(place < 2, e, f), tl.where(place < 6, g, h))
    return tl.where(place % 2 == 0, first << 16 | (last & 0xFFFF), (first & 0xFFFF0000) | last >> 16)


@triton.jit
def add_chunk(total, lost, chunk, index, blocks, onto, adder: tl.constexpr):
    """Add the sum of a chunk to a running sum; `index` is the chunk's first rounding."""
    drawn = (0, 0, 0, 0)
    if adder.roundings == 1:
        drawn = (random_integer(onto.noise, blocks, index), 0, 0, 0)
    elif adder.roundings == 4:
        drawn = (
            random_integer(onto.noise, blocks, index),
            random_integer(onto.noise, blocks, index + 1),
            random_integer(onto.noise, blocks, index + 2),
            random_integer(onto.noise, blocks, index + 3),
        )
    term = chunk.to(total.dtype)
    return add_term(total, lost, (term, tl.full(term.shape, 1.0, term.dtype)), drawn, onto, adder)


@triton.jit
def load_step(at_a, at_b, row, column, k, rows, columns, left, EVEN: tl.constexpr):
    """The elements of both operands for one step along the sum; zero where the sum or the matrix ends."""
    if EVEN:
        x, y = tl.load(at_a), tl.load(at_b)
    else:
        x = tl.load(at_a, mask=(row < rows)[:, None] & (k < left)[None, :], other=0.0)
        y = tl.load(at_b, mask=(k < left)[:, None] & (column < columns)[None, :], other=0.0)
    return x, y


@kernel(do_not_specialize=["every"], specialize=["batch_stride_a", "batch_stride_b"])
def chunked_kernel(
    a, b, out, seed_pointer, random: RandomNumbers, rows, columns, length, every,
    batch_stride_a: tl.int64, row_stride, stride_a, batch_stride_b: tl.int64, stride_b, column_stride,
    numbers: RoundingNumbers, adder: tl.constexpr, chunks: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Write one tile of a product, whose operands are matrices of bfloat16 or float16, by `chunks`, a `ChunkVariant`.

    Other arguments are as in `rounded_kernel`.
    """
    onto = rounding_of(seed_pointer, random.seed, random.stream, numbers, adder.wide)
    tile_row, tile_column = swizzled(tl.program_id(0), tl.cdiv(rows, tile.rows), tl.cdiv(columns, tile.columns), chunks.group)
    batch = tl.program_id(2).to(tl.int64)
    a, b = a + batch * batch_stride_a, b + batch * batch_stride_b
    row = tile_row.to(tl.int64) * tile.rows + tl.arange(0, tile.rows)
    column = tile_column.to(tl.int64) * tile.columns + tl.arange(0, tile.columns)
    CARRIER: tl.constexpr = tl.float64 if adder.wide else tl.float32
    STEP: tl.constexpr = chunks.step
    blocks = 0
    if adder.roundings > 0:
        element = batch * rows * columns + row[:, None] * columns + column[None, :]
        blocks = random.offset // 8 + element * (random.stride // 8)
    promoted, chunk = zeros(tile, tl.float32), zeros(tile, tl.float32)
    total, lost = zeros(tile, CARRIER), zeros(tile, CARRIER)
    index = 0
    k = tl.arange(0, STEP)
    at_a = a + row[:, None] * row_stride + k[None, :] * stride_a
    at_b = b + k[:, None] * stride_b + column[None, :] * column_stride
    for start in range(0, length, STEP):
        x, y = load_step(at_a, at_b, row, column, k, rows, columns, length - start, chunks.even)
        at_a, at_b = at_a + STEP * stride_a, at_b + STEP * stride_b
        if chunks.chunk == STEP:
            total, lost = add_chunk(total, lost, tl.dot(x, y, out_dtype=tl.float32), index, blocks, onto, adder)
            index += adder.roundings
        else:
            chunk = tl.dot(x, y, chunk)
            if (start + STEP) % chunks.chunk == 0 or start + STEP >= length:
                total, lost = add_chunk(total, lost, chunk, index, blocks, onto, adder)
                chunk = zeros(tile, tl.float32)
                index += adder.roundings
        if adder.promoted:
            ends = (start + STEP) % every == 0 or start + STEP >= length
            if ends:
                promoted += total.to(tl.float32)
                total, lost = zeros(tile, CARRIER), zeros(tile, CARRIER)
                index = 0
                if adder.roundings > 0:
                    blocks += random.inner_stride // 8
    result = promoted if adder.promoted else total.to(out.dtype.element_ty)
    at = out + batch * rows * columns + row[:, None] * columns + column[None, :]
    tl.store(at, with_one_nan(result), mask=(row < rows)[:, None] & (column < columns)[None, :])


@kernel(do_not_specialize=["steps", "steps_of_chunk", "every"])
def chained_kernel(
    a, b, exponents_a, exponents_b, out, seed_pointer, random: RandomNumbers, rows: tl.int64, columns: tl.int64, rows_a, rows_b,
    length: tl.int64, steps, steps_of_chunk, every, numbers: RoundingNumbers,
    adder: tl.constexpr, unit: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Write one tile of a product whose chunks are emulated by `unit`, an `AlignedVariant`.

    Other arguments are those of `rounded_kernel` and `aligned_kernel`, with `every` counting steps.
    """
    onto = rounding_of(seed_pointer, random.seed, random.stream, numbers, adder.wide)
    terms = first_terms(a, b, exponents_a, exponents_b, rows_a, rows_b, length, length // 2, tile)
    CARRIER: tl.constexpr = tl.float64 if adder.wide else tl.float32
    blocks = 0
    if adder.roundings > 0:
        blocks = first_blocks(rows, columns, random, tile)
    promoted = zeros(tile, tl.float32)
    total, lost = zeros(tile, CARRIER), zeros(tile, CARRIER)
    for outer in range(0, steps, every):
        last = tl.minimum(outer + every, steps)
        total, lost = zeros(tile, CARRIER), zeros(tile, CARRIER)
        for start in range(outer, last, steps_of_chunk):
            chunk = aligned_sum(terms, tl.minimum(steps_of_chunk, last - start), 0, unit)
            terms = terms_behind(terms, steps_of_chunk, unit)
            index = (start - outer) // steps_of_chunk * adder.roundings
            total, lost = add_chunk(total, lost, chunk, index, blocks, onto, adder)
        promoted += total.to(tl.float32)
        if adder.roundings > 0:
            blocks += random.inner_stride // 8
    result = promoted if adder.promoted else total.to(out.dtype.element_ty)
    store_sums(out, result, rows_a, rows_b, tile)
