"""The kernels: one per operator, over flat or transposed tensors. Formats and roundings are runtime arguments: a sweep compiles each once.

Full blocks are read and written without a mask, because masks depend on runtime values, which would prevent wide accesses.
"""

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import GridNumbers
from qsim_kernels.triton.device.blocks import as_dtype, as_single, encoded, load, note_lost, rounded, store
from qsim_kernels.triton.device.codes import values_of
from qsim_kernels.triton.device.noise import random_integers
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.rounding import clamp
from qsim_kernels.triton.device.transposed import encode_tile, quantize_and_encode_tile, quantize_tile
from qsim_kernels.triton.device.values import CodeNumbers, UsedNumbers, codes_in_carrier, in_carrier, noise_of


@triton.jit
def quantize_block(
    x, out, start, count, offset, noise, grid,
    V: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Round one block of values."""
    place = tl.arange(0, BLOCK)
    values = load(x + start, place, count - start, MASKED)
    # A conversion to 16 bits already makes every NaN the same.
    drawn = random_integers(noise, offset + start, V, RUN, ALIGNED, BLOCK)
    values = rounded(as_single(values), drawn, grid, V, out.dtype.element_ty == tl.float32)
    store(out + start, as_dtype(values, out.dtype.element_ty), place, count - start, MASKED)


@kernel(do_not_specialize_on_alignment=["seed_pointer"])
def quantize_kernel(
    x, out, seed_pointer, seed: tl.int64, noise_stream: tl.int64, offset: tl.int64,
    count: tl.int64, rows: tl.int64, columns: tl.int64,
    used: UsedNumbers, grid: GridNumbers,
    V: tl.constexpr, T: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Round `count` values, of matrices of `rows` and `columns` if there is a `TransposedTile`."""
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    noise = noise_of(seed, noise_stream, used)
    grid = in_carrier(grid, V.wide)
    start = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK)
    if T is not None:
        quantize_tile(x, out, rows, columns, offset, noise, grid, V, T)
    elif start + STEPS * BLOCK <= count:
        for step in range(STEPS):
            quantize_block(x, out, start + step * BLOCK, count, offset, noise, grid, V, RUN, ALIGNED, BLOCK, False)
    else:
        for step in range(STEPS):
            quantize_block(x, out, start + step * BLOCK, count, offset, noise, grid, V, RUN, ALIGNED, BLOCK, True)


@triton.jit
def encode_block(
    x, out, lost, start, count, offset, noise, grid, coding,
    V: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Round one block of values and write their codes."""
    place = tl.arange(0, BLOCK)
    values = as_single(load(x + start, place, count - start, MASKED))
    drawn = random_integers(noise, offset + start, V, RUN, ALIGNED, BLOCK)
    codes = encoded(values, drawn, grid, coding, V, C, out.dtype.element_ty != tl.int32)
    store(out + start, codes.to(out.dtype.element_ty), place, count - start, MASKED)
    if lost is not None:
        if not (V.fast and V.saturates):
            values = rounded(values, drawn, grid, V, True)
        # Each thread adds up its own.
        note_lost(lost, tl.reshape(values, (BLOCK // RUN, RUN)))


@kernel(do_not_specialize_on_alignment=["seed_pointer", "lost"])
def encode_kernel(
    x, out, lost, seed_pointer, seed: tl.int64, noise_stream: tl.int64, offset: tl.int64,
    count: tl.int64, rows: tl.int64, columns: tl.int64,
    used: UsedNumbers, grid: GridNumbers, coding: CodeNumbers,
    V: tl.constexpr, C: tl.constexpr, T: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round `count` values and write their codes; set `lost`, if given, where a NaN has no code."""
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    noise = noise_of(seed, noise_stream, used)
    grid = in_carrier(grid, V.wide)
    coding = codes_in_carrier(coding, grid.shift, V.wide)
    # Two blocks amortize a thread's fixed costs, which memory traffic would not hide.
    start = tl.program_id(0).to(tl.int64) * (2 * BLOCK)
    if T is not None:
        encode_tile(x, out, lost, rows, columns, offset, noise, grid, coding, V, C, T)
    elif start + 2 * BLOCK <= count:
        for step in range(2):
            encode_block(x, out, lost, start + step * BLOCK, count, offset, noise, grid, coding, V, C, RUN, ALIGNED, BLOCK, False)
    else:
        for step in range(2):
            encode_block(x, out, lost, start + step * BLOCK, count, offset, noise, grid, coding, V, C, RUN, ALIGNED, BLOCK, True)


@triton.jit
def decode_block(codes, out, start, count, coding, C: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Write the values of one block of codes."""
    place = tl.arange(0, BLOCK)
    read = load(codes + start, place, count - start, MASKED).to(tl.int32)
    # A conversion to 16 bits already makes every NaN the same.
    values = values_of(read.to(tl.uint32, bitcast=True), coding, C, C.wide or out.dtype.element_ty == tl.float32)
    store(out + start, as_dtype(values, out.dtype.element_ty), place, count - start, MASKED)


@kernel()
def decode_kernel(
    codes, out, count: tl.int64,
    shift: tl.int64, coding: CodeNumbers,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the values of `count` codes."""
    coding = codes_in_carrier(coding, shift, C.wide)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= count:
        decode_block(codes, out, start, count, coding, C, BLOCK, False)
    else:
        decode_block(codes, out, start, count, coding, C, BLOCK, True)


@triton.jit
def quantize_and_encode_block(
    x, out, codes_out, start, count, noise, grid, code_noise, code_grid, coding,
    V: tl.constexpr, W: tl.constexpr, C: tl.constexpr, ONE_GRID: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Round one block of values to two grids."""
    # A thread holds as many neighbours for the narrow codes as for the values; otherwise one of them would go through shared memory.
    place = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
    values = as_single(load(x + start, place, count - start, MASKED))
    drawn = random_integers(noise, start, V, RUN, True, BLOCK)
    code_drawn = random_integers(code_noise, start, W, RUN, True, BLOCK)
    # Steps shared by both are done once if the grid is the same.
    if ONE_GRID:
        values = clamp(values, grid, True)
    result = rounded(values, drawn, grid, V, out.dtype.element_ty == tl.float32, ONE_GRID)
    store(out + start, as_dtype(result, out.dtype.element_ty), place, count - start, MASKED)
    codes = encoded(values, code_drawn, code_grid, coding, W, C, codes_out.dtype.element_ty != tl.int32, ONE_GRID)
    store(codes_out + start, codes.to(codes_out.dtype.element_ty), place, count - start, MASKED)


@kernel(do_not_specialize_on_alignment=["seed_pointer"])
def quantize_and_encode_kernel(
    x, out, codes_out, seed_pointer, seed: tl.int64, noise_stream: tl.int64, code_stream: tl.int64,
    count: tl.int64, rows: tl.int64, columns: tl.int64,
    used: UsedNumbers, grid: GridNumbers,
    code_used: UsedNumbers, code_grid: GridNumbers, coding: CodeNumbers,
    V: tl.constexpr, W: tl.constexpr, C: tl.constexpr, T: tl.constexpr, ONE_GRID: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round `count` values to one grid, and to another whose codes are written: both that a layer needs of its input, in one read."""
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    noise = noise_of(seed, noise_stream, used)
    grid = in_carrier(grid, V.wide)
    code_noise = noise_of(seed, code_stream, code_used)
    coding = codes_in_carrier(coding, code_grid.shift, W.wide)
    code_grid = grid if ONE_GRID else in_carrier(code_grid, W.wide)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if T is not None:
        quantize_and_encode_tile(x, out, codes_out, rows, columns, noise, grid, code_noise, code_grid, coding, V, W, C, T)
    elif start + BLOCK <= count:
        quantize_and_encode_block(
            x, out, codes_out, start, count, noise, grid, code_noise, code_grid, coding, V, W, C, ONE_GRID, RUN, BLOCK, False
        )
    else:
        quantize_and_encode_block(
            x, out, codes_out, start, count, noise, grid, code_noise, code_grid, coding, V, W, C, ONE_GRID, RUN, BLOCK, True
        )
