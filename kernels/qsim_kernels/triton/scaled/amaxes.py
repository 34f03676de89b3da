"""Largest magnitudes of tiles of any size: a program reads part of one tile, or parts of several that are one element wide or high."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.scales import Tiles
from qsim_kernels.triton.device.blocks import as_single
from qsim_kernels.triton.device.hadamard import TurnVariant, hadamard
from qsim_kernels.triton.device.regions import Shape, inside, row_starts
from qsim_kernels.triton.host.launcher import Launcher

_NUMBERS = ["rows", "columns", "height", "width", "down", "along", "parts_down", "parts_along", "signs"]


@triton.jit
def part_of(part, size, parts, EACH: tl.constexpr, LENGTH: tl.constexpr):
    """The start and end of a part along one dimension, and its tile, or the first of its tiles if it covers several.

    Args:
        part: Number of the part.
        size: Elements of a tile along the dimension.
        parts: Parts of a tile.
        EACH: Whether a tile is one element, so that a part covers several.
        LENGTH: Elements of a part.
    """
    if EACH:
        tile = part.to(tl.int64) * LENGTH
        first, end = tile, tile + LENGTH
    else:
        # 64-bit divisions take as long as everything else.
        tile = (part // parts).to(tl.int64)
        first = tile * size + (part % parts).to(tl.int64) * LENGTH
        end = tl.minimum((tile + 1) * size, first + LENGTH)
    return tile, first, end


@triton.jit
def largest_of(
    x, row, row_end, column, column_end, columns, base, signs,
    T: tl.constexpr, S: tl.constexpr, FINITE: tl.constexpr, STEPS: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """The largest magnitude patterns at each position of the regions in a part."""
    found = tl.full((S.height, S.width), 0, tl.int32)
    for step in range(STEPS):
        from_row = row + (step * S.height if DOWN else 0)
        from_column = column + (0 if DOWN else step * S.width)
        place = row_starts(base + from_row, columns, from_column, S.height, S.even)[:, None] + tl.arange(0, S.width)[None, :]
        values = tl.load(x + place, mask=inside(from_row, row_end, from_column, column_end, S), other=0)
        bits = hadamard(as_single(values), signs, T, S.height, S.width).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        found = tl.maximum(found, tl.where(bits < 0x7F800000, bits, 0) if FINITE else bits)
    return found


@triton.jit(do_not_specialize=_NUMBERS)
def amaxes_kernel(
    x, out, rows: tl.int64, columns: tl.int64, height: tl.int64, width: tl.int64, down: tl.int64, along: tl.int64, parts_down: tl.int64,
    parts_along: tl.int64, signs: tl.int64,
    T: tl.constexpr, S: tl.constexpr, FINITE: tl.constexpr, ACROSS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Raise each tile's number in `out` to its largest magnitude pattern."""
    EACH_ROW: tl.constexpr = S.tile_height == 1
    EACH_COLUMN: tl.constexpr = S.tile_width == 1
    HEIGHT: tl.constexpr = S.height * STEPS if EACH_COLUMN else S.height
    WIDTH: tl.constexpr = S.width if EACH_COLUMN else S.width * STEPS
    program = tl.program_id(0)
    all_along = (tl.cdiv(columns, WIDTH) if EACH_COLUMN else parts_along * along).to(tl.int32)
    all_down = (tl.cdiv(rows, HEIGHT) if EACH_ROW else parts_down * down).to(tl.int32)
    rest = program // all_along
    matrix = (rest // all_down).to(tl.int64)
    tile_row, row, row_end = part_of(rest % all_down, height, parts_down.to(tl.int32), EACH_ROW, HEIGHT)
    tile_column, column, column_end = part_of(program % all_along, width, parts_along.to(tl.int32), EACH_COLUMN, WIDTH)
    base = matrix * rows
    row_end, column_end = tl.minimum(row_end, rows), tl.minimum(column_end, columns)
    found = largest_of(x, row, row_end, column, column_end, columns, base, signs.to(tl.int32), T, S, FINITE, STEPS, EACH_COLUMN)
    down_tiles = tile_row + tl.arange(0, S.height if EACH_ROW else 1)
    along_tiles = tile_column + tl.arange(0, S.width if EACH_COLUMN else 1)
    if not EACH_COLUMN:
        found = tl.max(found, axis=1, keep_dims=True)
    if not EACH_ROW:
        found = tl.max(found, axis=0, keep_dims=True)
    matrix = 0 if ACROSS else matrix
    place = ((matrix * down + down_tiles) * along)[:, None] + along_tiles[None, :]
    tl.atomic_max(out + place, found, mask=(down_tiles < down)[:, None] & (along_tiles < along)[None, :], sem="relaxed")


def amaxes_into(out: Tensor, x: Tensor, tiles: Tiles, turn: TurnVariant, signs: int, finite: bool) -> None:
    """Write the largest magnitude of each tile of a contiguous tensor; see `reference.scaling.amaxes_into`.

    Args:
        out: float32.
        x: Values of at most 32 bits.
        tiles: Which elements belong together.
        turn: A transform of blocks that are within tiles.
        signs: Its signs.
        finite: Whether to ignore non-finite values.
    """
    out.zero_()
    if not x.numel():
        return
    _, down, along = tiles.counts(x.numel())
    launcher, height, width = _reader(_shape(tiles, turn), turn, finite, tiles.across, x.dtype)
    parts_down, of_rows = _parts(tiles.rows, tiles.height, height)
    parts_along, of_columns = _parts(tiles.columns, tiles.width, width)
    matrices = x.numel() // (tiles.rows * tiles.columns)
    numbers = (tiles.rows, tiles.columns, tiles.height, tiles.width, down, along, parts_down, parts_along, signs)
    launcher.launch(matrices * of_rows * of_columns, x, out.view(torch.int32), *numbers)


def _parts(elements: int, size: int, length: int) -> tuple[int, int]:
    """The number of parts per tile along one dimension, and in total."""
    parts = -(-min(size, elements) // length)
    return parts, -(-elements // length) if size == 1 else parts * -(-elements // size)


def _shape(tiles: Tiles, turn: TurnVariant) -> Shape:
    """The region shape that fits the tiles: long regions, so that few programs compete for one number."""
    tall, wide = min(tiles.height, tiles.rows), min(tiles.width, tiles.columns)
    if turn.down or tiles.width == 1:
        height, width = 32, 64
    else:
        width = min(1024, max(16, 1 << turn.levels, triton.next_power_of_2(wide)))
        height = min(1024 // width, triton.next_power_of_2(tiles.rows if tiles.height == 1 else tall))
    even = tiles.columns % 16 == 0 and (tiles.width % 16 == 0 or tiles.width in (1, tiles.columns))
    return Shape(height, width, int(tiles.height == 1), int(tiles.width == 1), False, even, False, 1)


@lru_cache(maxsize=1024)
def _reader(shape: Shape, turn: TurnVariant, finite: bool, across: bool, source: torch.dtype) -> tuple[Launcher, int, int]:
    """The kernel, and the number of rows and columns that one of its programs reads."""
    single = shape.tile_height == shape.tile_width == 1
    steps = 8 if shape.height * shape.width >= 1024 and not single else 1
    height, width = (shape.height * steps, shape.width) if shape.tile_width == 1 else (shape.height, shape.width * steps)
    constants = (turn, shape, finite, across, steps)
    return Launcher(amaxes_kernel, (), constants, 1, num_warps=1 if shape.height > 1 else 4), height, width
