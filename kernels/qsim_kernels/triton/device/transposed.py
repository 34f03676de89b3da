"""Rounding matrices that are stored transposed, such as channels-last images, without transposing them in memory.

Random bits belong to logical indices and are made for neighbours together. So a program works on a tile: it reads and writes memory along
the columns, and makes random bits along the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from qsim_kernels.triton.device.blocks import as_dtype, as_single, encoded, note_lost, rounded
from qsim_kernels.triton.device.noise import integers_of_rows


class TransposedTile(NamedTuple):
    """The form of a tile that a kernel is compiled for.

    Attributes:
        rows: Rows in memory.
        columns: Columns in memory.
        run: Number of neighbours in logical order that a thread makes random bits for.
        aligned: Whether columns begin where random bits begin.
        even: Whether rows begin at multiples of 16 elements.
        whole: Whether tiles fill the matrix.
    """

    rows: int
    columns: int
    run: int
    aligned: bool
    even: bool
    whole: bool


@triton.jit
def places_of(program, rows, columns, T: tl.constexpr):
    """The memory offsets of a tile's elements, one matrix column per row, and the logical index of each column's first element."""
    across, down = tl.cdiv(columns, T.columns).to(tl.int32), tl.cdiv(rows, T.rows).to(tl.int32)
    rest = program // across
    column = (program % across).to(tl.int64) * T.columns + tl.arange(0, T.columns)
    row = (rest % down).to(tl.int64) * T.rows
    matrix = (rest // down).to(tl.int64) * (rows * columns)
    starts = matrix + (row + tl.arange(0, T.rows)) * columns
    if T.even:
        starts = tl.multiple_of(starts, [16])
    inside = (column < columns)[:, None] & (row + tl.arange(0, T.rows) < rows)[None, :]
    return starts[None, :] + column[:, None], inside, matrix + column * rows + row


@triton.jit
def load_tile(x, places, inside, T: tl.constexpr):
    """Load the elements of a tile; zero outside the matrix."""
    if T.whole:
        elements = tl.load(x + places)
    else:
        elements = tl.load(x + places, mask=inside, other=0)
    return as_single(elements)


@triton.jit
def store_tile(out, values, places, inside, T: tl.constexpr):
    """Write the elements of a tile."""
    if T.whole:
        tl.store(out + places, values)
    else:
        tl.store(out + places, values, mask=inside)


@triton.jit
def quantize_tile(x, out, rows, columns, offset, noise, grid, V: tl.constexpr, T: tl.constexpr):
    """Round one tile of values."""
    places, inside, first = places_of(tl.program_id(0), rows, columns, T)
    values = load_tile(x, places, inside, T)
    drawn = integers_of_rows(noise, offset + first, V, T.run, T.aligned, T.rows)
    values = rounded(values, drawn, grid, V, out.dtype.element_ty == tl.float32)
    store_tile(out, as_dtype(values, out.dtype.element_ty), places, inside, T)


@triton.jit
def encode_tile(x, out, lost, rows, columns, offset, noise, grid, coding, V: tl.constexpr, C: tl.constexpr, T: tl.constexpr):
    """Round one tile of values and write their codes; set `lost`, if given, where a NaN has no code."""
    places, inside, first = places_of(tl.program_id(0), rows, columns, T)
    values = load_tile(x, places, inside, T)
    drawn = integers_of_rows(noise, offset + first, V, T.run, T.aligned, T.rows)
    codes = encoded(values, drawn, grid, coding, V, C, out.dtype.element_ty != tl.int32)
    store_tile(out, codes.to(out.dtype.element_ty), places, inside, T)
    if lost is not None:
        if not (V.fast and V.saturates):
            values = rounded(values, drawn, grid, V, True)
        note_lost(lost, values)


@triton.jit
def quantize_and_encode_tile(
    x, out, codes_out, rows, columns, noise, grid, code_noise, code_grid, coding,
    V: tl.constexpr, W: tl.constexpr, C: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Round one tile of values to two grids."""
    places, inside, first = places_of(tl.program_id(0), rows, columns, T)
    values = load_tile(x, places, inside, T)
    drawn = integers_of_rows(noise, first, V, T.run, T.aligned, T.rows)
    result = rounded(values, drawn, grid, V, out.dtype.element_ty == tl.float32)
    store_tile(out, as_dtype(result, out.dtype.element_ty), places, inside, T)
    code_drawn = integers_of_rows(code_noise, first, W, T.run, T.aligned, T.rows)
    codes = encoded(values, code_drawn, code_grid, coding, W, C, codes_out.dtype.element_ty != tl.int32)
    store_tile(codes_out, codes.to(codes_out.dtype.element_ty), places, inside, T)
