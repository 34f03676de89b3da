"""Running sums of chunks on an H100, whose matrix unit defines the sum of a chunk; see `RoundedSum` and `rounded_sums`.

`tl.dot` computes the chunks, which gives the defined numbers.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import RoundingNumbers
from qsim_kernels.triton.accumulate.aligned import zeros
from qsim_kernels.triton.accumulate.rounded_sums import RandomNumbers, add_chunk
from qsim_kernels.triton.device.blocks import with_one_nan
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
