"""Partitioning of a tensor into the regions that programs work on: tiles in memory, and how much of them a thread holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qsim_kernels.numbers.grid import GridRounding, Mode
from qsim_kernels.numbers.scales import AHEAD, ElementRounding, Restore, ScaledRounding, Scales, TileSizes, Turn
from qsim_kernels.torch.hadamard import signs_of
from qsim_kernels.triton.device.pairs import PAIRS
from qsim_kernels.triton.device.regions import NO_TURN, RegionShape, TurnVariant
from qsim_kernels.triton.device.values import KernelVariant
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.arguments import seed_of
from qsim_kernels.triton.host.launcher import Launch, launcher
from qsim_kernels.triton.quantize.launch import run_length

# Elements of the largest region that a program holds.
_LARGEST = 2**14
#: Elements of a row that a thread of a small region holds, at least, and columns of one of a transposed matrix, at most.
_RUN, _WIDEST = 16, 256
#: Transforms of larger blocks go through plain torch.
_LARGEST_TURN = 32


#: The dtypes of a kernel's input and output.
Types = tuple[torch.dtype, torch.dtype]
#: Rows and columns.
Size = tuple[int, int]


class Cut(NamedTuple):
    """A partition of a tensor into regions, for a launch.

    Attributes:
        shape: The form of a region.
        programs: Number of programs.
        matrices: The numbers of `regions.Matrices`.
        warps: Warps of a program.
        registers: Largest number of registers of a thread; 0 leaves it to the compiler.
    """

    shape: RegionShape
    programs: int
    matrices: tuple[int, ...]
    warps: int
    registers: int

    def launch(self, kernel: Any, form: tuple[Any, ...], tail: tuple[Any, ...], *sizes: int) -> Launch:
        """The launch of a kernel whose arguments behind those of `regions.Matrices` are some sizes, and then a tail; see `launcher`."""
        options = {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})
        return Launch(launcher(kernel, form, *tail, **options), self.programs, (*self.matrices, *sizes))


class Reading(NamedTuple):
    """The way in which a kernel reads a contiguous tensor of at most 32 bits.

    Attributes:
        elements: Number of elements.
        tiles: Which elements share a scale.
        turn: The transform that the kernel does.
        signs: Its signs, one bit per element of a block.
    """

    elements: int
    tiles: TileSizes
    turn: TurnVariant
    signs: int


class ScaledCall(NamedTuple):
    """A rounding under scales as its launch depends on it, apart from how scales are made.

    Attributes:
        tiles: Which elements share a scale.
        turn: The transform of the values beforehand.
        elements: How elements are rounded.
        shape: The tensor's shape.
        types: Its dtype and that of the result.
        unseeded: Whether there is no tensor with a seed.
        aligned: Whether random bits begin at the first element.
        even: Whether both tensors begin at multiples of 16 bytes; it matters to kernels of pairs.
        wholes: The number of scales that others are under: one for the whole tensor, or one for each matrix.
        rows: The rows of matrices that are stored transposed; 0 if the tensor is stored in logical order.
        unflipped: Whether signs are those of the transform.
        in_runs: Whether matrices are runs of a tensor's rows; then its shape is that of all of them.
    """

    tiles: TileSizes
    turn: Turn | None
    elements: ElementRounding
    shape: torch.Size
    types: Types
    unseeded: bool
    aligned: bool
    even: bool
    wholes: int
    rows: int
    unflipped: bool
    in_runs: bool

    @property
    def are_pairs(self) -> bool:
        """Whether kernels of pairs can read and write the tensors, and multiply by the scales."""
        types = torch.bfloat16, torch.bfloat16
        return self.types == types and self.aligned and self.even and self.elements.restore != Restore.NOTHING

    @property
    def joins_rows(self) -> bool:
        """Whether tiles of one row may be read as if all rows were one."""
        return self.wholes < 2 and not self.in_runs

    @property
    def reading(self) -> Reading | None:
        """The way to read the tensor, if kernels can."""
        return reading(self.shape.numel(), self.types[0], self.tiles, self.turn)

    @property
    def rounding(self) -> tuple[KernelVariant, tuple[int, ...]]:
        """The variant and numbers of the rounding; if more bytes are moved, all random bits are drawn at no extra cost."""
        variant, numbers = arguments.rounding(GridRounding(self.elements.grid, self.elements.rule), False)
        return arguments.drawn_later(variant, self.elements.grid, few_bits=False) if is_narrow(*self.types) else variant, numbers


def call_of(
    out: Tensor,
    x: Tensor,
    rounding: ScaledRounding,
    under: Tensor | None = None,
    rows: int = 0,
    unflipped: bool = True,
    held: Tensor | None = None,
) -> tuple[ScaledCall, tuple[Tensor | None, int, int, int]]:
    """A call, and the source of its random bits as kernels take it: a tensor with a seed or a seed, a stream, and an offset."""
    tiles, turn, elements, (seed, stream, offset) = rounding
    pointer, number = seed_of(seed, x)
    even, wholes = (x.data_ptr() | out.data_ptr()) % 16 == 0, 0 if under is None else under.numel()
    types, unseeded, aligned = (x.dtype, out.dtype), pointer is None, offset % 8 == 0
    shape = x.shape if held is None else torch.Size((len(held), tiles.rows, tiles.columns))
    call = ScaledCall(tiles, turn, elements, shape, types, unseeded, aligned, even, wholes, rows, unflipped, held is not None)
    return call, (pointer, number, stream, offset)


def reading(count: int, source: torch.dtype, tiles: TileSizes, turn: Turn | None) -> Reading | None:
    """The way to read a tensor; none if float64 is needed, or if plain torch has to transform the tensor first."""
    if source == torch.float64:
        return None
    if tiles.across and tiles.columns == 1:
        # Neighbours in memory have different scales: these are columns rather than rows.
        matrices = count // tiles.rows if tiles.rows else 0
        tiles = TileSizes(matrices, tiles.rows, max(matrices, 1), 1, False)
    if turn is None:
        return Reading(count, tiles, NO_TURN, 0)
    if turn.size > _LARGEST_TURN or turn.length % turn.size:
        return None
    if turn.inner > 1 and tiles.counts(count) == (1, 1, 1):
        tiles = TileSizes(turn.length, turn.inner, turn.length, turn.inner, True)
    if turn.inner == 1:
        fits = tiles.columns % turn.length == 0 and _holds(tiles.columns, tiles.width, turn.size)
    else:
        fits = (tiles.rows, tiles.columns) == (turn.length, turn.inner) and _holds(tiles.rows, tiles.height, turn.size)
    variant = TurnVariant(turn.size.bit_length() - 1, turn.inner > 1, turn.size**-0.5, source == torch.float16)
    return Reading(count, tiles, variant, _bits(turn)) if fits else None


def reading_ahead(call: ScaledCall, tiles: TileSizes, turn: Turn) -> Reading | None:
    """The way to find the largest magnitudes of tiles of a transform while a tensor is rounded untransformed, if kernels can.

    They round blocks along the rows of one bfloat16 matrix, and transform whole blocks down its columns.
    """
    count, width = call.shape.numel(), call.tiles.width
    read = reading(count, call.types[0], tiles, turn) if count == tiles.rows * tiles.columns > 0 else None
    is_plain = call.types == (torch.bfloat16, torch.bfloat16) and call.even and call.turn is None and call.wholes < 2
    are_rows = call.tiles == (call.tiles.rows, tiles.columns, 1, width, False) and not (tiles.columns | AHEAD) % width
    if read is None or not (is_plain and are_rows and read.turn.down) or tiles.columns % 32 or tiles.columns >= 2**26:
        return None
    return read._replace(tiles=tiles) if tiles[2:4] == (1 << read.turn.levels, AHEAD) else None


def _bits(turn: Turn) -> int:
    """The signs of a transform, one bit per element of a block."""
    return sum((sign < 0) << place for place, sign in enumerate(signs_of(turn)))


def _holds(elements: int, size: int, block: int) -> bool:
    """Whether tiles of a given size along a dimension consist of whole blocks."""
    return size % block == 0 or size >= elements


def is_narrow(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether so few bytes are moved that instructions determine the time."""
    return source.itemsize == target.itemsize == 2


def cut_between_tiles(
    read: Reading, types: Types, elements: ElementRounding, aligned: bool, making: Scales, *, joins_rows: bool = True
) -> Cut | None:
    """Regions that hold whole tiles, if possible. Elements and registers per thread were tuned by experiment.

    Tiles of one row are read as if all rows were one, if `joins_rows`.
    """
    count, (rows, columns, height, width, across), turn, _ = read
    if across or height & (height - 1) or width & (width - 1):
        return None
    block, narrow, draws = 1 << turn.levels, is_narrow(*types), elements.rule.mode == Mode.STOCHASTIC
    if draws:
        a_thread, warps, registers = 32, 1 if narrow else 2, 0
    else:
        limit = 112 if turn.levels else 0 if making.grid.mantissa == 0 else 128
        a_thread, warps, registers = (64, 1, limit) if narrow else (32, 4, 0)
    if height == 1 and columns % width == 0 and not turn.down:
        rows, columns = (1, count) if joins_rows else (rows, columns)
        size = 2048 if draws or (narrow and making.grid.mantissa == 0) else 4096 if narrow else 1024
        tall, wide = 1, max(size, width, block)
        warps, registers = 4, 0
    elif width == 1:
        tall = max(height, block if turn.down else 1)
        warps = 4 if tall > 64 else warps
        wide = max(16, block, 32 * warps * a_thread // max(tall, 16))
    else:
        wide = max(64, width, block)
        tall = max(height, block if turn.down else 1, min(1024 // wide, triton.next_power_of_2(rows)))
        warps = max(1, tall * wide // (32 * a_thread))
    if tall * wide > _LARGEST:
        return None
    return cut_into(count, types, aligned, (rows, columns), (tall, wide), (height, width), warps, registers)


def cut_ahead(ahead: Reading, width: int, aligned: bool, each: int = 1) -> Cut:
    """Regions that are whole tiles of `reading_ahead`, with blocks of a width along rows; columns are counted in `each`."""
    rows, columns, height, wide, _ = ahead.tiles
    types, warps = (torch.bfloat16, torch.bfloat16), wide // 64  # each thread has a pair of columns
    return cut_into(ahead.elements // each, types, aligned, (rows, columns // each), (height, wide // each), (1, width // each), warps)


#: The columns and warps of a region, found by experiment, where tiles are rows or larger.
_ROWS_IN_PAIRS, _TILES_IN_PAIRS = (2048, 2), (64, 4)
#: The same where tiles are columns of so many rows.
_COLUMNS_IN_PAIRS = {16: (128, 1), 32: (64, 1), 64: (32, 1), 128: (64, 4)}


def cut_into_pairs(read: Reading, *, joins_rows: bool) -> Cut | None:
    """Regions of pairs of bfloat16 values that hold whole tiles, if possible, with columns counted in pairs; see `cut_between_tiles`."""
    count, (rows, columns, height, width, across), turn, _ = read
    known = _COLUMNS_IN_PAIRS if width == 1 else {1: _ROWS_IN_PAIRS} if height == 1 else {height: _TILES_IN_PAIRS}
    are_powers = not (height & (height - 1) or width & (width - 1))
    if across or turn.levels or columns % 32 or not are_powers or 1 < width < 16 or height not in known:
        return None
    if height == 1 and columns % width == 0 and joins_rows:
        rows, columns = 1, count
    wide, warps = known[height]
    # Each thread holds all pairs of a Philox block.
    wide = max(wide, width, 2 * PAIRS * 32 * warps // height)
    if height * wide > _LARGEST or (height > 1 and height * columns >= 2**31):
        return None
    matrix, region, tile = (rows, columns // 2), (height, wide // 2), (height, max(width // 2, 1))
    return cut_into(count // 2, (torch.bfloat16, torch.bfloat16), True, matrix, region, tile, warps)


def cut_into_blocks(read: Reading, *, joins_rows: bool) -> Cut | None:
    """Regions of pairs of bfloat16 values for 32 threads, each with whole blocks of a transform, if these are tiles."""
    count, (rows, columns, height, width, across), turn, _ = read
    block = 1 << turn.levels
    tile = (block, 1) if turn.down else (1, block)
    if across or (height, width) != tile or not 16 <= block <= 32 or rows % tile[0] or columns % max(tile[1], 32):
        return None
    if turn.down:
        fits, matrix, region = block * columns < 2**31, (rows, columns // 2), (block, 32)
    else:
        fits, matrix, region = joins_rows, (1, count // 2), (1, 16 * block)
    pairs = (tile[0], max(tile[1] // 2, 1))
    # Where matrices end within blocks, the compiler would use 154, and fewer threads would run.
    registers = 0 if block < 32 or not turn.down else 112 if joins_rows else 128
    return cut_into(count // 2, (torch.bfloat16, torch.bfloat16), True, matrix, region, pairs, 1, registers) if fits else None


def pair_signs(read: Reading) -> int:
    """The signs of a transform for pairs: of each 16, bit `i` for the first element of pair `i`, `16 + i` for the second, as int64."""
    block = range(1 << read.turn.levels)
    # Below each other, both elements have the sign of their row.
    elements = [(place, half) for place in block for half in (0, 1)] if read.turn.down else [divmod(place, 2) for place in block]
    bits = [32 * (pair // 16) + 16 * half + pair % 16 for pair, half in elements]
    word = sum((read.signs >> (number // 2 if read.turn.down else number) & 1) << bit for number, bit in enumerate(bits))
    return word - (word >> 63 << 64)


def cut_small(read: Reading, types: Types, elements: ElementRounding, aligned: bool, scales: Scales) -> Cut | None:
    """Regions that hold whole tiles, so small that several numbers for each value stay in registers; see `cut_between_tiles`."""
    count, (rows, columns, height, width, across), turn, _ = read
    if across or turn.down or height & (height - 1) or width & (width - 1) or height * width > _LARGEST:
        return cut_between_tiles(read, types, elements, aligned, scales)
    run = max(_RUN, 1 << turn.levels)
    wide = max(32 * run // height, width)
    matrix = (1, count) if height == 1 else (rows, columns)
    cut = cut_into(count, types, aligned, matrix, (height, wide), (height, width), max(height * wide // (32 * run), 1))
    return cut._replace(shape=cut.shape._replace(run=run)) if height == 1 and types[0].itemsize == 2 and count % run == 0 else cut


def cut_transposed(read: Reading, types: Types, aligned: bool, rows: int) -> Cut | None:
    """The same of matrices of some rows that are stored transposed, if tiles are parts of rows: a thread for each run of a row."""
    count, tiles, turn, _ = read
    run = max(_RUN, 1 << turn.levels)
    wide = max(run, tiles.width)
    if tiles.height > 1 or tiles.across or turn.down or tiles.columns % wide or wide > _WIDEST or tiles.width & (tiles.width - 1):
        return None
    cut = cut_into(count, types, aligned, (rows, tiles.columns), (32, wide), (1, tiles.width), wide // run)
    return cut._replace(shape=cut.shape._replace(even=rows % 16 == 0, run=run, transposed=True))


def cut(read: Reading, types: Types, elements: ElementRounding, aligned: bool) -> Cut:
    """Regions for given scales, which need not hold whole tiles."""
    _, (rows, columns, height, width, _), turn, _ = read
    block, size, registers = 1 << turn.levels, 1024, 0
    if is_narrow(*types) and width > 1 and not turn.levels:
        size, registers = 2048, 0 if elements.rule.mode == Mode.STOCHASTIC else 32
    if turn.down:
        tall, wide = block, 64
    else:
        wide = min(size, max(16, block, triton.next_power_of_2(columns)))
        tall = max(1, min(size // wide, triton.next_power_of_2(rows)))
    tile = (0 if height >= rows else height, 0 if width >= columns else width)
    return cut_into(read.elements, types, aligned, (rows, columns), (tall, wide), tile, 1 if turn.down else 4, registers)


def cut_into(count: int, types: Types, aligned: bool, matrix: Size, region: Size, tile: Size, warps: int, registers: int = 0) -> Cut:
    """A number of elements in regions.

    Args:
        count: The number.
        types: The dtypes.
        aligned: Whether random bits begin at the first element.
        matrix: Rows and columns of a matrix.
        region: Rows and columns of a region.
        tile: Rows and columns of a tile, 0 for all of a matrix.
        warps: See `Cut`.
        registers: See `Cut`.
    """
    rows, columns = matrix
    is_flat = rows == 1 and count == columns and region[0] == 1
    aligned = aligned and (rows * columns == columns == count or columns % 8 == 0)
    shape = RegionShape(*region, *tile, is_flat, columns % 16 == 0, aligned, run_length(*types))
    down, along = (-(-size // part) if part else 1 for size, part in zip(matrix, tile, strict=True))
    regions_down, regions_along = -(-rows // region[0]), -(-columns // region[1])
    programs = count // (rows * columns) * regions_down * regions_along if count else 0
    return Cut(shape, programs, (rows, columns, down, along, regions_down, regions_along), warps, registers)
