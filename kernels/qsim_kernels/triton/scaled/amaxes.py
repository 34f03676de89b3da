"""Largest magnitudes of tiles of any size: a program reads part of one tile, or parts of several that are one element wide or high."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers.scales import TileSizes, Turn
from qsim_kernels.torch import scaling as reference
from qsim_kernels.torch.hadamard import hadamard as hadamard_in_torch
from qsim_kernels.triton.device.blocks import as_single
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import RegionShape, TurnVariant, hadamard, inside, row_starts
from qsim_kernels.triton.host.launcher import Launch, launcher
from qsim_kernels.triton.scaled.partition import reading

#: Elements of a row that a single program reads at most.
_SMALL = 1 << 16


class Parts(NamedTuple):
    """A tensor viewed as consecutive matrices, their tiles, and the parts of tiles that programs read.

    Attributes:
        rows: Rows of a matrix.
        columns: Columns of a matrix.
        height: Rows of a tile.
        width: Columns of a tile.
        down: Tiles down a matrix.
        along: Tiles along a matrix.
        parts_down: Parts down a tile.
        parts_along: Parts along a tile.
    """

    rows: Any
    columns: Any
    height: Any
    width: Any
    down: Any
    along: Any
    parts_down: Any
    parts_along: Any


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
def largest_patterns(
    x, row, row_end, column, column_end, columns, base, signs,
    TURN: tl.constexpr, REGION: tl.constexpr, FINITE: tl.constexpr, STEPS: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """The largest magnitude patterns at each position of the regions in a part."""
    amaxes = tl.full((REGION.height, REGION.width), 0, tl.int32)
    for step in range(STEPS):
        from_row = row + (step * REGION.height if DOWN else 0)
        from_column = column + (0 if DOWN else step * REGION.width)
        place = row_starts(base + from_row, columns, from_column, REGION.height, REGION.even)[:, None] + tl.arange(0, REGION.width)[None, :]
        values = tl.load(x + place, mask=inside(from_row, row_end, from_column, column_end, REGION), other=0)
        bits = hadamard(as_single(values), signs, TURN, REGION.height, REGION.width).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amaxes = tl.maximum(amaxes, tl.where(bits < 0x7F800000, bits, 0) if FINITE else bits)
    return amaxes


@kernel()
def amaxes_kernel(
    x, out, parts: Parts, signs: tl.int64,
    TURN: tl.constexpr, REGION: tl.constexpr, FINITE: tl.constexpr, ACROSS: tl.constexpr, STEPS: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Write each tile's largest magnitude pattern if a single program reads it; otherwise raise its number in `out`, zero at first."""
    EACH_ROW: tl.constexpr = REGION.tile_height == 1
    EACH_COLUMN: tl.constexpr = REGION.tile_width == 1
    HEIGHT: tl.constexpr = REGION.height * STEPS if EACH_COLUMN else REGION.height
    WIDTH: tl.constexpr = REGION.width if EACH_COLUMN else REGION.width * STEPS
    program = tl.program_id(0)
    all_along = (tl.cdiv(parts.columns, WIDTH) if EACH_COLUMN else parts.parts_along * parts.along).to(tl.int32)
    all_down = (tl.cdiv(parts.rows, HEIGHT) if EACH_ROW else parts.parts_down * parts.down).to(tl.int32)
    rest = program // all_along
    matrix = (rest // all_down).to(tl.int64)
    tile_row, row, row_end = part_of(rest % all_down, parts.height, parts.parts_down.to(tl.int32), EACH_ROW, HEIGHT)
    tile_column, column, column_end = part_of(program % all_along, parts.width, parts.parts_along.to(tl.int32), EACH_COLUMN, WIDTH)
    base = matrix * parts.rows
    row_end, column_end = tl.minimum(row_end, parts.rows), tl.minimum(column_end, parts.columns)
    amaxes = largest_patterns(x, row, row_end, column, column_end, parts.columns, base, signs, TURN, REGION, FINITE, STEPS, EACH_COLUMN)
    down_tiles = tile_row + tl.arange(0, REGION.height if EACH_ROW else 1)
    along_tiles = tile_column + tl.arange(0, REGION.width if EACH_COLUMN else 1)
    if not EACH_COLUMN:
        amaxes = tl.max(amaxes, axis=1, keep_dims=True)
    if not EACH_ROW:
        amaxes = tl.max(amaxes, axis=0, keep_dims=True)
    matrix = 0 if ACROSS else matrix
    place = ((matrix * parts.down + down_tiles) * parts.along)[:, None] + along_tiles[None, :]
    patterns = out.to(tl.pointer_type(tl.int32)) + place
    within = (down_tiles < parts.down)[:, None] & (along_tiles < parts.along)[None, :]
    if SINGLE:
        tl.store(patterns, amaxes, mask=within)
    else:
        tl.atomic_max(patterns, amaxes, mask=within, sem="relaxed")


def amaxes_into(out: Tensor, x: Tensor, tiles: TileSizes, turn: Turn | None, finite: bool) -> None:
    """Write the largest magnitude of each tile; see `reference.scaling.amaxes_into`."""
    prepared = _prepared(x.shape, x.dtype, tiles, turn, finite)
    if prepared is None:
        if turn is None or x.dtype == torch.float64:
            reference.amaxes_into(out, x, tiles, turn, finite)
        else:
            amaxes_into(out, hadamard_in_torch(x, turn), tiles, None, finite)
        return
    launch, is_single = prepared
    if not is_single:
        out.zero_()
    launch(x.contiguous(), out)


@lru_cache(maxsize=4096)
def _prepared(shape: torch.Size, source: torch.dtype, tiles: TileSizes, turn: Turn | None, finite: bool) -> tuple[Launch, bool] | None:
    """The launch, and whether a single program reads each tile; none if float64 is needed, or if plain torch transforms the tensor."""
    read = reading(shape.numel(), source, tiles, turn)
    if read is None:
        return None
    count, tiles, variant, signs = read
    if not count:
        return Launch(launcher(amaxes_kernel, ()), 0), False
    matrices = count // (tiles.rows * tiles.columns)
    region, steps, warps = _region(tiles, variant)
    height, width = (region.height * steps, region.width) if tiles.width == 1 else (region.height, region.width * steps)
    parts_down, of_rows = _parts(tiles.rows, tiles.height, height)
    parts_along, of_columns = _parts(tiles.columns, tiles.width, width)
    is_single = parts_down == parts_along == 1 and (matrices == 1 or not tiles.across)
    constants = (variant, region, finite, tiles.across, steps, is_single)
    run = launcher(amaxes_kernel, (source,), *constants, num_warps=warps)
    _, down, along = tiles.counts(count)
    parts = Parts(tiles.rows, tiles.columns, tiles.height, tiles.width, down, along, parts_down, parts_along)
    return Launch(run, matrices * of_rows * of_columns, (*parts, signs)), is_single


def _parts(elements: int, size: int, length: int) -> tuple[int, int]:
    """The number of parts per tile along one dimension, and in total."""
    parts = -(-min(size, elements) // length)
    return parts, -(-elements // length) if size == 1 else parts * -(-elements // size)


def _region(tiles: TileSizes, turn: TurnVariant) -> tuple[RegionShape, int, int]:
    """The shape of a region that fits the tiles, the number of regions that a program reads, and its warps.

    Regions are long, so that few programs compete for one number. A small tensor is read by one program.
    """
    tall, wide = min(tiles.height, tiles.rows), min(tiles.width, tiles.columns)
    even = tiles.columns % 16 == 0 and (tiles.width % 16 == 0 or tiles.width in (1, tiles.columns))
    form = (int(tiles.height == 1), int(tiles.width == 1), False, even, False, 1)
    if tall == tiles.rows == 1 and 8192 < wide == tiles.columns <= _SMALL and not turn.levels:
        return RegionShape(1, _SMALL // 4, *form), 4, 32
    if turn.down or tiles.width == 1:
        height, width = 32, 64
    else:
        width = min(1024, max(16, 1 << turn.levels, triton.next_power_of_2(wide)))
        height = min(1024 // width, triton.next_power_of_2(tiles.rows if tiles.height == 1 else tall))
    steps = 8 if height * width >= 1024 and not tiles.height == tiles.width == 1 else 1
    return RegionShape(height, width, *form), steps, 1 if height > 1 else 4
