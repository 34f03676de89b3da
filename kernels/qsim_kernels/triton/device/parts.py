"""The elements that a program processes together: a block of consecutive ones, or a tile of a matrix that is stored transposed.

Random bits belong to logical indices and are made for neighbours together. Where a matrix is stored transposed, such as a channels-last
image, a program works on a tile, without transposing it in memory: it reads and writes along the columns, and makes random bits along the
rows. Full blocks and tiles are read and written without a mask, because masks depend on runtime values, which would prevent wide accesses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.triton.device.noise import random_integers


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


class Blocks(NamedTuple):
    """The blocks that a program processes one after the other.

    Attributes:
        block: Elements of a block.
        steps: Number of blocks.
        run: Number of neighbours a thread holds.
        aligned: Whether the first element begins a Philox block.
    """

    block: int
    steps: int
    run: int
    aligned: bool


class Sizes(NamedTuple):
    """The number of elements, and the rows and columns of transposed matrices."""

    count: Any
    rows: Any
    columns: Any


class Part(NamedTuple):
    """Elements in memory.

    Attributes:
        start: The offset of the first element.
        places: The elements' offsets from there.
        inside: Which of them exist; True for all, which compilers know, so that there is no mask.
        first: The logical index of the first element, or of the first of each row.
    """

    start: Any
    places: Any
    inside: Any
    first: Any


@triton.jit
def block_part(start, count, BLOCK: tl.constexpr, MASKED: tl.constexpr, RUN: tl.constexpr = 0):
    """The block that begins with an element; with `RUN` a thread holds as many neighbours of all tensors, whatever their dtypes."""
    place = tl.arange(0, BLOCK)
    if RUN:
        place = tl.max_contiguous(place, RUN)
    if MASKED:
        return Part(start, place, place < count - start, start)
    else:
        return Part(start, place, True, start)


@triton.jit
def tile_part(rows, columns, TILE: tl.constexpr):
    """The tile of a program."""
    places, inside, first = places_of(tl.program_id(0), rows, columns, TILE)
    if TILE.whole:
        return Part(0, places, True, first)
    else:
        return Part(0, places, inside, first)


@triton.jit
def places_of(program, rows, columns, TILE: tl.constexpr):
    """The memory offsets of a tile's elements, one matrix column per row, and the logical index of each column's first element."""
    across, down = tl.cdiv(columns, TILE.columns).to(tl.int32), tl.cdiv(rows, TILE.rows).to(tl.int32)
    rest = program // across
    column = (program % across).to(tl.int64) * TILE.columns + tl.arange(0, TILE.columns)
    row = (rest % down).to(tl.int64) * TILE.rows
    matrix = (rest // down).to(tl.int64) * (rows * columns)
    starts = matrix + (row + tl.arange(0, TILE.rows)) * columns
    if TILE.even:
        starts = tl.multiple_of(starts, [16])
    inside = (column < columns)[:, None] & (row + tl.arange(0, TILE.rows) < rows)[None, :]
    return starts[None, :] + column[:, None], inside, matrix + column * rows + row


@triton.jit
def swizzled(tile, down, along, DEEP: tl.constexpr):
    """The row and column of a tile of a product, so that programs that run together share rows and columns of operands."""
    width = DEEP * along
    first = tile // width * DEEP
    deep = tl.minimum(down - first, DEEP)
    return first + tile % width % deep, tile % width // deep


@triton.jit
def load_part(x, part):
    """Load the elements of a part; zero where there are none."""
    return tl.load(x + part.start + part.places, mask=part.inside, other=0)


@triton.jit
def store_part(out, values, part):
    """Write the elements of a part."""
    tl.store(out + part.start + part.places, values, mask=part.inside)


@triton.jit
def drawn_for(part, offset, noise, ROUNDING: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """The random integers of a part, given the logical index of the whole tensor's first element."""
    if TILE is None:
        return random_integers(noise, offset + part.first, ROUNDING, BLOCKS.run, BLOCKS.aligned, BLOCKS.block)
    else:
        return random_integers(noise, offset + part.first, ROUNDING, TILE.run, TILE.aligned, TILE.rows)
