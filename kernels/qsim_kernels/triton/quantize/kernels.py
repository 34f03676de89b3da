"""The kernels: one per operator. Formats and roundings are runtime arguments, so that a sweep compiles each once."""

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import RoundingNumbers
from qsim_kernels.numbers.grid import NoiseNumbers
from qsim_kernels.triton.device.blocks import as_dtype, as_single, encoded, note_lost, rounded
from qsim_kernels.triton.device.code_pairs import codes_of_pairs
from qsim_kernels.triton.device.codes import values_of
from qsim_kernels.triton.device.column_pairs import RUN, rounded_columns
from qsim_kernels.triton.device.parts import Sizes, block_part, drawn_for, load_part, store_part, tile_part
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.rounding import clamp
from qsim_kernels.triton.device.values import Codes, codes_in_carrier, rounding_of


@triton.jit
def on_parts(
    work: tl.constexpr, given, constants: tl.constexpr, sizes, BLOCKS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr = 0
):  # fmt: skip
    """Call a function with each part of a program's elements: a tile, or some blocks, without a mask where all are full.

    Args:
        work: The function.
        given: Its arguments after the part.
        constants: Those behind them that are known when code is compiled.
        sizes: `Sizes`.
        BLOCKS: The program's `Blocks`.
        TILE: The `TransposedTile`, if matrices are stored transposed.
        RUN: See `block_part`.
    """
    start = tl.program_id(0).to(tl.int64) * (BLOCKS.steps * BLOCKS.block)
    if TILE is not None:
        work(tile_part(sizes.rows, sizes.columns, TILE), *given, *constants, BLOCKS, TILE)
    elif start + BLOCKS.steps * BLOCKS.block <= sizes.count:
        for step in range(BLOCKS.steps):
            work(block_part(start + step * BLOCKS.block, sizes.count, BLOCKS.block, False, RUN), *given, *constants, BLOCKS, TILE)
    else:
        for step in range(BLOCKS.steps):
            work(block_part(start + step * BLOCKS.block, sizes.count, BLOCKS.block, True, RUN), *given, *constants, BLOCKS, TILE)


@triton.jit
def quantize_part(part, x, out, offset, rounding, ROUNDING: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Round some values."""
    values = load_part(x, part)
    drawn = drawn_for(part, offset, rounding.noise, ROUNDING, BLOCKS, TILE)
    # A conversion to 16 bits already makes every NaN the same.
    values = rounded(as_single(values), drawn, rounding.grid, ROUNDING, out.dtype.element_ty == tl.float32)
    store_part(out, as_dtype(values, out.dtype.element_ty), part)


@kernel(do_not_specialize_on_alignment=["seed_pointer"])
def quantize_kernel(
    x, out, seed_pointer, source: NoiseNumbers, sizes: Sizes, numbers: RoundingNumbers,
    ROUNDING: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round values, of transposed matrices if there is a `TransposedTile`."""
    rounding = rounding_of(seed_pointer, source.seed, source.stream, numbers, ROUNDING.wide)
    on_parts(quantize_part, (x, out, source.offset, rounding), (ROUNDING,), sizes, BLOCKS, TILE)


@triton.jit
def load_rows(x, step, inside, COUNT: tl.constexpr):
    """Load elements of `COUNT` rows, a tuple."""
    if COUNT == 1:
        return (tl.load(x, mask=inside, other=0),)
    else:
        HALF: tl.constexpr = COUNT // 2
        return load_rows(x, step, inside, HALF) + load_rows(x + HALF * step, step, inside, HALF)


@kernel(do_not_specialize_on_alignment=["seed_pointer"])
def column_pairs_kernel(
    x, out, seed_pointer, source: NoiseNumbers, sizes: Sizes, numbers: RoundingNumbers,
    ROUNDING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round bfloat16 values of transposed matrices stochastically, in pairs."""
    rounding = rounding_of(seed_pointer, source.seed, source.stream, numbers, ROUNDING.wide)
    # Pairs per row in memory, and runs of rows per matrix.
    pairs, runs = tl.multiple_of(sizes.columns // 2, [8]), sizes.rows // RUN
    across, down = tl.cdiv(sizes.columns, TILE.columns).to(tl.int32), tl.cdiv(sizes.rows, TILE.rows).to(tl.int32)
    rest = tl.program_id(0) // across
    matrix = (rest // down).to(tl.int64)
    pair = (tl.program_id(0) % across * (TILE.columns // 2)).to(tl.int64) + tl.arange(0, TILE.columns // 2)[None, :]
    run = (rest % down * (TILE.rows // RUN)).to(tl.int64) + tl.arange(0, TILE.rows // RUN)[:, None]
    inside = True if TILE.whole else (pair < pairs) & (run < runs)
    block = (source.offset >> 3) + (matrix * sizes.columns + 2 * pair) * runs + run
    places = tl.multiple_of((matrix * runs + run) * (RUN * pairs), [8, 8]) + pair
    x, out = x.to(tl.pointer_type(tl.int32)) + places, out.to(tl.pointer_type(tl.int32)) + places
    read = load_rows(x, pairs, inside, RUN)
    rounded = rounded_columns(read, block, block + runs, rounding.noise, rounding.grid, ROUNDING)
    for i in tl.static_range(RUN):
        tl.store(out + i * pairs, rounded[i], mask=inside)


@triton.jit
def encode_part(
    part, x, out, lost, offset, rounding, coding,
    ROUNDING: tl.constexpr, CODING: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round some values and write their codes."""
    read = load_part(x, part)
    values = as_single(read)
    drawn = drawn_for(part, offset, rounding.noise, ROUNDING, BLOCKS, TILE)
    if ROUNDING.in_pairs:
        codes = codes_of_pairs(read, drawn, rounding.grid, coding, ROUNDING.fills_byte)
    else:
        codes = encoded(values, drawn, rounding.grid, coding, ROUNDING, CODING, out.dtype.element_ty != tl.int32)
    store_part(out, codes.to(out.dtype.element_ty), part)
    if lost is not None:
        if not (ROUNDING.fast and ROUNDING.saturates):
            values = rounded(values, drawn, rounding.grid, ROUNDING, True)
        if TILE is None:
            # Each thread adds up its own.
            values = tl.reshape(values, (BLOCKS.block // BLOCKS.run, BLOCKS.run))
        note_lost(lost, values)


@kernel(do_not_specialize_on_alignment=["seed_pointer", "lost"])
def encode_kernel(
    x, out, lost, seed_pointer, source: NoiseNumbers, sizes: Sizes, numbers: RoundingNumbers, coding: Codes,
    ROUNDING: tl.constexpr, CODING: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round values and write their codes; set `lost`, if given, where a NaN has no code."""
    rounding = rounding_of(seed_pointer, source.seed, source.stream, numbers, ROUNDING.wide)
    coding = codes_in_carrier(coding, rounding.grid.shift, ROUNDING.wide)
    on_parts(encode_part, (x, out, lost, source.offset, rounding, coding), (ROUNDING, CODING), sizes, BLOCKS, TILE)


@triton.jit
def decode_part(part, codes, out, coding, CODING: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Write the values of some codes."""
    read = load_part(codes, part).to(tl.int32)
    # A conversion to 16 bits already makes every NaN the same.
    values = values_of(read.to(tl.uint32, bitcast=True), coding, CODING, CODING.wide or out.dtype.element_ty == tl.float32)
    store_part(out, as_dtype(values, out.dtype.element_ty), part)


@kernel()
def decode_kernel(
    codes, out, sizes: Sizes, coding: Codes, CODING: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write the values of codes."""
    on_parts(decode_part, (codes, out, codes_in_carrier(coding, coding.shift, CODING.wide)), (CODING,), sizes, BLOCKS, TILE)


@triton.jit
def quantize_and_encode_part(
    part, x, out, codes_out, rounding, code_rounding, coding,
    ROUNDING: tl.constexpr, CODE_ROUNDING: tl.constexpr, CODING: tl.constexpr, ONE_GRID: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round some values to two grids."""
    values = as_single(load_part(x, part))
    drawn = drawn_for(part, 0, rounding.noise, ROUNDING, BLOCKS, TILE)
    code_drawn = drawn_for(part, 0, code_rounding.noise, CODE_ROUNDING, BLOCKS, TILE)
    # Steps shared by both are done once if the grid is the same.
    CLAMPED: tl.constexpr = ONE_GRID and TILE is None
    if CLAMPED:
        values = clamp(values, rounding.grid, True)
    result = rounded(values, drawn, rounding.grid, ROUNDING, out.dtype.element_ty == tl.float32, CLAMPED)
    store_part(out, as_dtype(result, out.dtype.element_ty), part)
    grid = rounding.grid if ONE_GRID else code_rounding.grid
    codes = encoded(values, code_drawn, grid, coding, CODE_ROUNDING, CODING, codes_out.dtype.element_ty != tl.int32, CLAMPED)
    store_part(codes_out, codes.to(codes_out.dtype.element_ty), part)


@kernel(do_not_specialize_on_alignment=["seed_pointer"])
def quantize_and_encode_kernel(
    x, out, codes_out, seed_pointer, seed: tl.int64, noise_stream: tl.int64, code_stream: tl.int64, sizes: Sizes,
    numbers: RoundingNumbers, code_numbers: RoundingNumbers, coding: Codes,
    ROUNDING: tl.constexpr, CODE_ROUNDING: tl.constexpr, CODING: tl.constexpr,
    ONE_GRID: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round values to one grid, and to another whose codes are written: both that a layer needs of its input, in one read."""
    rounding = rounding_of(seed_pointer, seed, noise_stream, numbers, ROUNDING.wide)
    code_rounding = rounding_of(seed_pointer, seed, code_stream, code_numbers, CODE_ROUNDING.wide)
    coding = codes_in_carrier(coding, code_numbers.grid.shift, CODE_ROUNDING.wide)
    # A thread holds as many neighbours for the narrow codes as for the values; otherwise one of them would go through shared memory.
    given = (x, out, codes_out, rounding, code_rounding, coding)
    on_parts(quantize_and_encode_part, given, (ROUNDING, CODE_ROUNDING, CODING, ONE_GRID), sizes, BLOCKS, TILE, BLOCKS.run)
