"""Products of groups, in float32 sums: of rows with a matrix for each group, and of columns with rows, which gives a matrix for each group.

Operands are tensor descriptors, by which a Hopper chip copies tiles without its threads; elements outside of a tensor are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qsim_kernels.meanings.triton import INTERPRETED
from qsim_kernels.triton.device.blocks import as_single, narrowed
from qsim_kernels.triton.device.parts import swizzled
from qsim_kernels.triton.host.capabilities import compute_capability


class Factor(NamedTuple):
    """A factor of a result, in memory.

    Attributes:
        numbers: A pointer, or `None` for no factor.
        of_group: The step from a number to that of the next group, 0 where all share one.
        of_row: The step to that of the next row.
        of_column: The step to that of the next column.
    """

    numbers: Any
    of_group: Any
    of_row: Any
    of_column: Any


@triton.jit
def plus_product(total, a, b):
    """A tile of sums plus the product of two tiles of 16-bit operands."""
    if INTERPRETED:
        total += tl.dot(as_single(a), as_single(b))
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def times(total, factor, group, row, column, inside):
    """A tile of products times a factor."""
    if factor.numbers is not None:
        place = group.to(tl.int64) * factor.of_group + (row.to(tl.int64) * factor.of_row)[:, None] + (column * factor.of_column)[None, :]
        total *= tl.load(factor.numbers + place, mask=inside, other=0)
    return total


@triton.jit(do_not_specialize=["groups"], do_not_specialize_on_alignment=["ends", "first", "second"])
def rows_kernel(
    a, b, out, ends, first, second, groups: tl.int32, rows, columns, summed,
    first_group, first_row, first_column, second_group, second_row, second_column,
    TRANSPOSED: tl.constexpr, MOST: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Write the products of rows with the matrix of their group, and zeros for the rows after the last group.

    Every group begins with a new tile, so the number of tiles before a group depends on the sizes of all groups before it. Rows after the
    last group count as another one.
    """
    number = tl.arange(0, MOST)
    end = tl.where(number < groups, tl.load(ends + number, mask=number < groups, other=0), rows)
    begin = tl.load(ends + tl.maximum(number - 1, 0), mask=number <= groups, other=0)
    begin = tl.where(number == 0, 0, tl.where(number <= groups, begin, rows))
    tiles = tl.cdiv(end - begin, HEIGHT)
    last = tl.cumsum(tiles, 0)
    down, along = tl.sum(tiles, 0), tl.cdiv(columns, WIDTH)
    if tl.program_id(0) < down * along:
        tile_row, tile_column = swizzled(tl.program_id(0), down, along, DEEP)
        group = tl.sum((last <= tile_row).to(tl.int32), 0)
        here = number == group
        row = tl.sum(tl.where(here, begin + (tile_row - last + tiles) * HEIGHT, 0), 0)
        size = tl.sum(tl.where(here, end, 0), 0) - row
        column, matrix = tile_column * WIDTH, tl.minimum(group, groups - 1)
        total = tl.zeros((HEIGHT, WIDTH), tl.float32)
        for step in range(tl.where(group < groups, tl.cdiv(summed, DEPTH), 0)):
            one = a.load([row, step * DEPTH])
            if TRANSPOSED:
                other = tl.reshape(b.load([matrix, column, step * DEPTH]), (WIDTH, DEPTH)).T
            else:
                other = tl.reshape(b.load([matrix, step * DEPTH, column]), (DEPTH, WIDTH))
            total = plus_product(total, one, other)
        down_rows, along_columns = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
        inside = (tl.arange(0, HEIGHT) < size)[:, None] & (along_columns < columns)[None, :]
        known = inside & (group < groups)
        total = times(total, Factor(first, first_group, first_row, first_column), group, down_rows, along_columns, known)
        total = times(total, Factor(second, second_group, second_row, second_column), group, down_rows, along_columns, known)
        place = out + down_rows.to(tl.int64)[:, None] * columns + along_columns[None, :]
        tl.store(place, narrowed(total, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["ends", "first", "second"])
def columns_kernel(
    a, b, out, ends, first, second, rows, columns,
    first_group, first_row, first_column, second_group, second_row, second_column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Write each group's product of columns with rows, which sums over the rows of the group; `a` has the columns as rows."""
    down, along = tl.cdiv(rows, HEIGHT), tl.cdiv(columns, WIDTH)
    group = tl.program_id(0) // (down * along)
    tile_row, tile_column = swizzled(tl.program_id(0) % (down * along), down, along, DEEP)
    start, end = tl.where(group > 0, tl.load(ends + tl.maximum(group - 1, 0)), 0), tl.load(ends + group)
    row, column = tile_row * HEIGHT, tile_column * WIDTH
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    whole = (end - start) // DEPTH
    for step in range(whole):
        total = plus_product(total, a.load([start + step * DEPTH, row]).T, b.load([start + step * DEPTH, column]))
    rest = end - start - whole * DEPTH
    if rest > 0:
        # Rows of other groups, which may not be finite, must not count.
        own = (tl.arange(0, DEPTH) < rest)[:, None]
        one = tl.where(own, a.load([end - rest, row]), 0)
        other = tl.where(own, b.load([end - rest, column]), 0)
        total = plus_product(total, one.T, other)
    down_rows, along_columns = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
    inside = (down_rows < rows)[:, None] & (along_columns < columns)[None, :]
    total = times(total, Factor(first, first_group, first_row, first_column), group, down_rows, along_columns, inside)
    total = times(total, Factor(second, second_group, second_row, second_column), group, down_rows, along_columns, inside)
    place = out + (group.to(tl.int64) * rows + down_rows.to(tl.int64))[:, None] * columns + along_columns[None, :]
    tl.store(place, narrowed(total, out.dtype.element_ty), mask=inside)


class TileShape(NamedTuple):
    """The part of a result that a program computes, and how.

    Attributes:
        height: Rows.
        width: Columns.
        depth: Products that it adds at a time.
        deep: Tiles below each other whose programs run together.
        warps: Warps of a program.
        stages: Parts of the operands that are loaded ahead.
    """

    height: int
    width: int
    depth: int
    deep: int
    warps: int
    stages: int


#: The fastest of eleven on an H200, for chips with that much shared memory, and one that others have room for.
_LARGE, _SMALL = TileShape(128, 256, 64, 16, 8, 4), TileShape(64, 128, 64, 8, 4, 2)
#: The major compute capabilities of chips with more than 200 KiB of shared memory for a program.
_ROOMY = (9, 10)
#: Descriptors have multiples of so many bytes.
_ALIGNMENT = 16


def multiplies(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels compute a product: of 16-bit operands, whose rows begin at multiples of 16 bytes, as in torch's own."""
    known = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16) and dtype != torch.float64
    sizes = (a.shape[-1] if b.dim() == 3 else a.shape[0], b.shape[-1])
    return known and all(size * a.itemsize % _ALIGNMENT == 0 for size in sizes) and a.numel() > 0 and b.numel() > 0


def grouped_into(out: Tensor, a: Tensor, b: Tensor, ends: Tensor, factors: Sequence[Tensor], tile: TileShape | None = None) -> None:
    """Write the products of groups, summed in float32, times factors.

    Args:
        out: Contiguous; a matrix of rows, or a matrix for each group.
        a: Rows; or columns, if `b` is a matrix of rows.
        b: A matrix for each group, or rows.
        ends: The ends of the groups.
        factors: At most two, float32, whose three dimensions are groups, rows and columns, or 1.
        tile: How programs share the work.
    """
    first, second = (*factors, None, None)[:2]
    steps = [step for factor in (first, second) for step in _steps(factor)]
    ends, groups, tile = ends.to(torch.int32), len(ends), tile or _tile(out)
    if b.dim() == 3:
        rows, columns, summed = a.shape[0], b.shape[2], b.shape[1]
        transposed = b.stride(2) != 1
        one = _descriptor(a, tile.height, tile.depth)
        other = _descriptor(b.mT, 1, tile.width, tile.depth) if transposed else _descriptor(b, 1, tile.depth, tile.width)
        most = triton.cdiv(rows, tile.height) + groups
        sizes: tuple[int, ...] = (groups, rows, columns, summed)
        constants = {"TRANSPOSED": transposed, "MOST": triton.next_power_of_2(groups + 2)}
        kernel = rows_kernel
    else:
        rows, columns = a.shape[0], b.shape[1]
        one, other = _descriptor(a.t(), tile.depth, tile.height), _descriptor(b, tile.depth, tile.width)
        most = triton.cdiv(rows, tile.height) * groups
        sizes, constants, kernel = (rows, columns), {}, columns_kernel
    constants |= {"HEIGHT": tile.height, "WIDTH": tile.width, "DEPTH": tile.depth, "DEEP": tile.deep}
    constants |= {"num_warps": tile.warps, "num_stages": tile.stages}
    with torch.cuda.device_of(out):
        kernel[most * triton.cdiv(columns, tile.width),](one, other, out, ends, first, second, *sizes, *steps, **constants)


def _tile(out: Tensor) -> TileShape:
    """The shape of tiles for a device."""
    return _LARGE if not out.is_cuda or compute_capability(out.device)[0] in _ROOMY else _SMALL


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    """A descriptor of a tensor that loads blocks of a shape."""
    x = x.contiguous()
    x = x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def _steps(factor: Tensor | None) -> tuple[int, ...]:
    """The steps between the numbers of a factor along the dimensions of a result: 0 where all share one."""
    if factor is None:
        return 0, 0, 0
    return tuple(0 if size == 1 else stride for size, stride in zip(factor.shape, factor.stride(), strict=True))
