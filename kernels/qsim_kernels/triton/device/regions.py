"""Regions of matrices, one per program: the locations of their elements, and how they are read and written."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import INTERPRETED, elements
from qsim_kernels.triton.device.rounding import NAN

nearest_even, with_nan = elements.nearest_even, elements.with_nan


class Matrices(NamedTuple):
    """A tensor viewed as consecutive matrices, and the tiles in them that share a scale.

    Attributes:
        rows: Rows of a matrix.
        columns: Columns of a matrix.
        down: Tiles down a matrix.
        along: Tiles along a matrix.
        regions_down: Regions down a matrix.
        regions_along: Regions along a matrix.
    """

    rows: Any
    columns: Any
    down: Any
    along: Any
    regions_down: Any
    regions_along: Any


class RegionShape(NamedTuple):
    """The form of a region that a kernel is compiled for.

    Attributes:
        height: Rows of a region.
        width: Columns of a region.
        tile_height: Rows of a tile, 0 for all of the matrix.
        tile_width: Columns of a tile, 0 for all of the matrix.
        flat: Whether there is only one row.
        even: Whether rows begin at multiples of 16 elements.
        aligned: Whether rows begin where random bits begin.
        run: Number of neighbours a thread holds.
    """

    height: int
    width: int
    tile_height: int
    tile_width: int
    flat: bool
    even: bool
    aligned: bool
    run: int


class RegionPlace(NamedTuple):
    """The position of a region.

    Attributes:
        matrix: Number of its matrix.
        row: Its first row.
        column: Its first column.
        first: The index of each row's first element in the tensor.
    """

    matrix: Any
    row: Any
    column: Any
    first: Any


@triton.jit
def row_starts(row, columns, column, HEIGHT: tl.constexpr, EVEN: tl.constexpr):
    """The indices of rows' elements in a column; the compiler must see multiples of 16, or threads would read single elements."""
    starts = (row + tl.arange(0, HEIGHT)) * columns + column
    if EVEN:
        starts = tl.multiple_of(starts, [16])
    return starts


@triton.jit
def region_place(region, m, S: tl.constexpr):
    """The position of the region with a given number."""
    if S.flat:
        matrix, row, column = region * 0, region * 0, region.to(tl.int64) * S.width
        first = column + tl.arange(0, 1)
    else:
        # 64-bit divisions take as long as everything else.
        along, down = m.regions_along.to(tl.int32), m.regions_down.to(tl.int32)
        rest = region // along
        column = (region % along).to(tl.int64) * S.width
        row = (rest % down).to(tl.int64) * S.height
        matrix = (rest // down).to(tl.int64)
        first = row_starts(matrix * m.rows + row, m.columns, column, S.height, S.even)
    return RegionPlace(matrix, row, column, first)


@triton.jit
def inside(row, rows, column, columns, S: tl.constexpr):
    """Mask of a region's elements before a given row and column; if rows are even, in a form that lets threads read many at once."""
    left = columns - column
    if S.even:
        left = tl.multiple_of(left, 16)
    return (tl.arange(0, S.height) < rows - row)[:, None] & (tl.arange(0, S.width) < left)[None, :]


@triton.jit
def load_region(x, at, m, S: tl.constexpr):
    """Load the elements of a region; zero outside the matrix."""
    place = at.first[:, None] + tl.arange(0, S.width)[None, :]
    return tl.load(x + place, mask=inside(at.row, m.rows, at.column, m.columns, S), other=0)


@triton.jit
def store_region(out, values, at, m, S: tl.constexpr):
    """Write the elements of a region."""
    place = at.first[:, None] + tl.arange(0, S.width)[None, :]
    tl.store(out + place, values, mask=inside(at.row, m.rows, at.column, m.columns, S))


@triton.jit
def narrowed(x, TARGET: tl.constexpr):
    """Round float32 values to nearest in the stored type; every NaN becomes the same."""
    if TARGET == tl.float32:
        result = tl.where(x == x, x.to(tl.int32, bitcast=True), NAN).to(tl.float32, bitcast=True)
    elif INTERPRETED and TARGET == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        result = (with_nan(nearest_even(bits, 16), bits) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif INTERPRETED:
        bits = x.to(TARGET).to(tl.int16, bitcast=True)
        result = tl.where(x == x, bits, 0x7FFF).to(tl.int16).to(TARGET, bitcast=True)
    else:
        result = x.to(TARGET)
    return result
