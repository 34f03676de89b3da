"""Running sums of chunks: each chunk is the sum of an H100's matrix unit, and the running sum is rounded after each; see `RoundedSum`.

On that unit `chunked_kernel` lets `tl.dot` compute the chunks, which gives the defined numbers because it is the unit that defines them.
Everywhere else `chained_kernel` emulates the unit.
"""

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import GridNumbers
from qsim_kernels.triton.accumulate.aligned import chain, first_operands, moved, store_sums, with_one_nan
from qsim_kernels.triton.accumulate.rounded_sums import RandomNumbers, add_rounded, first_blocks
from qsim_kernels.triton.device.noise import LATE_BLOCKS, words
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.values import UsedNumbers, in_carrier, noise_of


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
def add_chunk(total, lost, chunk, index, blocks, noise, grid, C: tl.constexpr, V: tl.constexpr):
    """Add the sum of a chunk to a running sum; `index` is the chunk's first rounding."""
    drawn = (0, 0, 0, 0)
    if C.roundings == 1:
        drawn = (random_integer(noise, blocks, index), 0, 0, 0)
    elif C.roundings == 4:
        drawn = (
            random_integer(noise, blocks, index),
            random_integer(noise, blocks, index + 1),
            random_integer(noise, blocks, index + 2),
            random_integer(noise, blocks, index + 3),
        )
    if C.kahan:
        # Times -1, because a unary minus here is a subtraction from zero, which has no -0.
        due = add_rounded(chunk, -1.0 * lost, drawn[0], noise, grid, C, V)
        after = add_rounded(total, due, drawn[1], noise, grid, C, V)
        gained = add_rounded(after, -1.0 * total, drawn[2], noise, grid, C, V)
        lost = add_rounded(gained, -1.0 * due, drawn[3], noise, grid, C, V)
        lost = tl.where(tl.abs(after) < float("inf"), lost, 0.0)
        total = after
    else:
        total = add_rounded(total, chunk, drawn[0], noise, grid, C, V)
    return total, lost


@triton.jit
def grouped_tile(program, rows, columns, M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr):
    """The row and the column of a program's tile: programs that run at the same time share rows and columns."""
    down, across = tl.cdiv(rows, M), tl.cdiv(columns, N)
    group = program // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    return group * GROUP + program % (GROUP * across) % height, program % (GROUP * across) // height


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
    a, b, out, seed_pointer, random: RandomNumbers,
    rows, columns, length, every,
    batch_stride_a: tl.int64, row_stride, stride_a, batch_stride_b: tl.int64, stride_b, column_stride,
    used: UsedNumbers, grid: GridNumbers,
    C: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, INNER: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write one tile of a product, whose operands are matrices of bfloat16 or float16; other arguments are as in `rounded_kernel`."""
    seed = random.seed if seed_pointer is None else tl.load(seed_pointer)
    noise, grid = noise_of(seed, random.stream, used), in_carrier(grid, C.wide)
    tile_row, tile_column = grouped_tile(tl.program_id(0), rows, columns, M, N, GROUP)
    batch = tl.program_id(2).to(tl.int64)
    a, b = a + batch * batch_stride_a, b + batch * batch_stride_b
    row, column = tile_row.to(tl.int64) * M + tl.arange(0, M), tile_column.to(tl.int64) * N + tl.arange(0, N)
    CARRIER: tl.constexpr = tl.float64 if C.wide else tl.float32
    blocks = 0
    if C.roundings > 0:
        element = batch * rows * columns + row[:, None] * columns + column[None, :]
        blocks = random.offset // 8 + element * (random.stride // 8)
    promoted, chunk = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
    total, lost = tl.zeros((M, N), CARRIER), tl.zeros((M, N), CARRIER)
    index = 0
    k = tl.arange(0, INNER)
    at_a = a + row[:, None] * row_stride + k[None, :] * stride_a
    at_b = b + k[:, None] * stride_b + column[None, :] * column_stride
    for start in range(0, length, INNER):
        x, y = load_step(at_a, at_b, row, column, k, rows, columns, length - start, EVEN)
        at_a, at_b = at_a + INNER * stride_a, at_b + INNER * stride_b
        if CHUNK == INNER:
            own = tl.dot(x, y, out_dtype=tl.float32)
            total, lost = add_chunk(total, lost, own.to(CARRIER), index, blocks, noise, grid, C, V)
            index += C.roundings
        else:
            chunk = tl.dot(x, y, chunk)
            if (start + INNER) % CHUNK == 0 or start + INNER >= length:
                total, lost = add_chunk(total, lost, chunk.to(CARRIER), index, blocks, noise, grid, C, V)
                chunk = tl.zeros((M, N), tl.float32)
                index += C.roundings
        if C.promoted:
            ends = (start + INNER) % every == 0 or start + INNER >= length
            if ends:
                promoted += total.to(tl.float32)
                total, lost = tl.zeros((M, N), CARRIER), tl.zeros((M, N), CARRIER)
                index = 0
                if C.roundings > 0:
                    blocks += random.inner_stride // 8
    result = promoted if C.promoted else total.to(out.dtype.element_ty)
    at = out + batch * rows * columns + row[:, None] * columns + column[None, :]
    tl.store(at, with_one_nan(result), mask=(row < rows)[:, None] & (column < columns)[None, :])


@kernel(do_not_specialize=["blocks_of_sum", "blocks_of_chunk", "every"])
def chained_kernel(
    a, b, exponents_a, exponents_b, out, seed_pointer, random: RandomNumbers,
    rows: tl.int64, columns: tl.int64, rows_a, rows_b, length: tl.int64, blocks_of_sum, blocks_of_chunk, every,
    used: UsedNumbers, grid: GridNumbers,
    C: tl.constexpr, V: tl.constexpr, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write one tile of a product; the arguments are those of `rounded_kernel` and `aligned_kernel`, with `every` counting blocks."""
    seed = random.seed if seed_pointer is None else tl.load(seed_pointer)
    noise, grid = noise_of(seed, random.stream, used), in_carrier(grid, C.wide)
    operands = first_operands(a, b, exponents_a, exponents_b, rows_a, rows_b, length, P, M, N)
    CARRIER: tl.constexpr = tl.float64 if C.wide else tl.float32
    blocks = 0
    if C.roundings > 0:
        blocks = first_blocks(rows, columns, random.offset, random.stride, M, N)
    promoted = tl.zeros((M, N), tl.float32)
    total, lost = tl.zeros((M, N), CARRIER), tl.zeros((M, N), CARRIER)
    for outer in range(0, blocks_of_sum, every):
        last = tl.minimum(outer + every, blocks_of_sum)
        total, lost = tl.zeros((M, N), CARRIER), tl.zeros((M, N), CARRIER)
        for start in range(outer, last, blocks_of_chunk):
            chunk = chain(operands, tl.minimum(blocks_of_chunk, last - start), rows_a, rows_b, grid, P, None, M, N)
            operands = moved(operands, blocks_of_chunk, rows_a, rows_b, P)
            index = (start - outer) // blocks_of_chunk * C.roundings
            total, lost = add_chunk(total, lost, chunk.to(CARRIER), index, blocks, noise, grid, C, V)
        promoted += total.to(tl.float32)
        if C.roundings > 0:
            blocks += random.inner_stride // 8
    result = promoted if C.promoted else total.to(out.dtype.element_ty)
    store_sums(out, result, rows_a, rows_b, M, N)
