"""Operands of emulated products as planes: `[batch, length, rows]`, padded with zeros, so that a row of outer products is read in one go.

A plane of values is float32 or float64. A plane of exponents has two 16-bit numbers in each int32, those of neighbours along the sum: the
lower half is the first's. A zero has the exponent `NONE`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.triton.device.blocks import as_single

#: The exponent of zero: far below those of all products, and the sum of two of them still fits 16 bits.
NONE: tl.constexpr = tl.constexpr(-8192)
#: Up to this exponent of both operands, sums of at most 2**24 products and the powers of two that truncate them are in float32's range.
NARROW: tl.constexpr = tl.constexpr(32)

_ROWS, _LENGTH = 64, 32


class PlaneScales(NamedTuple):
    """The scales of an operand.

    Attributes:
        values: Float32, `[batch, rows, groups]`.
        group: The number of neighbours along the sum that share one.
        low: The exponent of the smallest normal number in their format.
    """

    values: Tensor
    group: int
    low: int


class Planes(NamedTuple):
    """An operand as planes.

    Attributes:
        values: The values.
        exponents: Their exponents, or None.
        rows: The number of rows of a plane, with padding.
        length: The number of elements along the sum, with padding.
    """

    values: Tensor
    exponents: Tensor | None
    rows: int
    length: int


class OperandLines(NamedTuple):
    """The rows or columns of an operand that a program multiplies, from some place along the sum on.

    Pointers are scalars that move along the sum: a thread's elements then have constant distances from one another.

    Attributes:
        elements: Pointer into its plane of values. A tuple in Triton has other `values`.
        others: Pointer into its plane of exponents or of scales.
        lines: The rows or the columns of a program's tile.
        size: The number of lines of a plane.
    """

    elements: Any
    others: Any
    lines: Any
    size: Any


class Terms(NamedTuple):
    """The products of a tile from some place along the sum on: those of the two operands there."""

    a: OperandLines
    b: OperandLines


@triton.jit
def tile_start(rows, tile: tl.constexpr):
    """The first row and the first column of a program's tile.

    Tiles below each other follow each other, all in the first dimension of a launch: CUDA limits the others to 65,535.
    """
    down = tl.cdiv(rows, tile.rows).to(tl.int32)
    return tl.program_id(0) % down * tile.rows, tl.program_id(0) // down * tile.columns


@triton.jit
def first_terms(a, b, others_a, others_b, rows_a, rows_b, length, others, tile: tl.constexpr):
    """The `Terms` of a program's tile, given the number of values and of others along the sum of a batch."""
    batch = tl.program_id(2).to(tl.int64)
    first_row, first_column = tile_start(rows_a, tile)
    row, column = first_row + tl.arange(0, tile.rows), first_column + tl.arange(0, tile.columns)
    left = OperandLines(a + batch * length * rows_a, others_a + batch * others * rows_a, row, rows_a)
    return Terms(left, OperandLines(b + batch * length * rows_b, others_b + batch * others * rows_b, column, rows_b))


@triton.jit
def behind(terms, values, others):
    """The `Terms` behind so many values and others along the sum."""
    a, b = terms.a, terms.b
    left = OperandLines(a.elements + values * a.size, a.others + others * a.size, a.lines, a.size)
    return Terms(left, OperandLines(b.elements + values * b.size, b.others + others * b.size, b.lines, b.size))


@triton.jit
def values_at(operand, k):
    """The values of an operand's lines at a place."""
    return tl.load(operand.elements + k * operand.size + operand.lines)


@triton.jit
def others_at(operand, k):
    """The exponents or scales of an operand's lines at a place."""
    return tl.load(operand.others + k * operand.size + operand.lines)


@triton.jit
def zeros_of(terms, DTYPE: tl.constexpr):
    """A zero for each element of a tile."""
    return tl.zeros((terms.a.lines.shape[0], terms.b.lines.shape[0]), DTYPE)


@triton.jit
def exponents_of(x, low):
    """`floor(log2 |x|)` of float32 values, but at least `low`; `NONE` for zeros and 128 for what is not finite."""
    field = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return tl.where(x == 0.0, NONE, tl.maximum(field - 127, low))


@triton.jit(do_not_specialize=["low", "block", "padded_block", "count", "length", "low_scale", "group"])
def planes_kernel(
    x, values, exponents, is_wide, count, length, batch_stride: tl.int64, row_stride: tl.int64, length_stride: tl.int64,
    rows: tl.int64, padded_length: tl.int64, low, block, padded_block,
    scales, scale_batch_stride: tl.int64, scale_row_stride: tl.int64, scale_group_stride: tl.int64, low_scale, group,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Write one tile of both planes; set `is_wide` if an exponent is above `NARROW`.

    Args:
        x: The operand's elements, of `count` rows with `length` elements each.
        values: The plane of values.
        exponents: The plane of exponents, with `PAIRS`.
        is_wide: One int32.
        count: The operand's own number of rows.
        length: Its own number of elements along the sum.
        batch_stride: Elements between two matrices.
        row_stride: Elements between two rows.
        length_stride: Elements between two neighbours along the sum.
        rows: The number of rows of a plane.
        padded_length: The number of its elements along the sum.
        low: See `exponents_of`.
        block: Elements along the sum that are followed by zeros, up to `padded_block`.
        padded_block: At least `block`; an even number with `PAIRS`.
        scales: Float32 factors of the elements, one for each `group` of them in a row, which become part of the values; or None.
        scale_batch_stride: The strides of the scales.
        scale_row_stride: The same.
        scale_group_stride: The same.
        low_scale: The smallest exponent of scales, which are added to those of the elements.
        group: Neighbours along the sum that share a scale.
        PAIRS: Whether exponents are wanted.
        ROWS: Rows of a tile.
        LENGTH: Elements along the sum of a tile.
    """
    batch = tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(padded_length, LENGTH)
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tile * LENGTH + tl.arange(0, LENGTH)
    element = place // padded_block * block + place % padded_block
    known = (place % padded_block < block) & (element < length)
    at = x + batch * batch_stride + row[:, None] * row_stride + element[None, :] * length_stride
    given = (row < count)[:, None] & known[None, :]
    elements = as_single(tl.load(at, mask=given, other=0.0))
    scale = elements
    if scales is not None:
        of_group = scales + batch * scale_batch_stride + row[:, None] * scale_row_stride + (element // group)[None, :] * scale_group_stride
        scale = tl.load(of_group, mask=given, other=0.0)
    held = (row < rows)[:, None] & (place < padded_length)[None, :]
    into = values + batch * rows * padded_length + place[None, :] * rows + row[:, None]
    value = elements.to(values.dtype.element_ty)
    if scales is not None:
        value *= scale.to(values.dtype.element_ty)
    tl.store(into, value, mask=held)
    if PAIRS:
        powers = exponents_of(elements, low)
        if scales is not None:
            powers = tl.maximum(powers + exponents_of(scale, low_scale), NONE)
        tl.atomic_max(is_wide, 1, mask=tl.max(tl.max(powers, 1), 0) > NARROW, sem="relaxed")
        first, second = tl.split(tl.reshape(powers, (ROWS, LENGTH // 2, 2)))
        pair = tile * (LENGTH // 2) + tl.arange(0, LENGTH // 2)
        into = exponents + batch * rows * (padded_length // 2) + pair[None, :] * rows + row[:, None]
        tl.store(into, second << 16 | (first & 0xFFFF), mask=(row < rows)[:, None] & (pair < padded_length // 2)[None, :])


def planes(
    x: Tensor,
    dtype: torch.dtype,
    tile: int,
    block: int = 1,
    low: int | None = None,
    is_wide: Tensor | None = None,
    *,
    padded_block: int | None = None,
    scales: PlaneScales | None = None,
) -> Planes:
    """Write an operand as planes.

    Args:
        x: `[batch, rows, length]`, of any strides.
        dtype: The dtype of the values.
        tile: The rows of a plane are padded to a multiple of this.
        block: Elements along the sum that belong together.
        low: The smallest exponent; None where exponents are not wanted.
        is_wide: One int32, set to 1 if an exponent is above `NARROW`.
        padded_block: Elements of a block with its padding; by default an even number if exponents are wanted, and otherwise `block`.
        scales: Factors of the values, whose exponents are added to those of the elements.
    """
    if x.dtype.itemsize == 1:
        x = x.to(torch.bfloat16)
    batches, count, length = x.shape
    pairs = low is not None
    padded_block = padded_block or block + (block & 1 if pairs else 0)
    rows, padded_length = -(-count // tile) * tile, -(-length // block) * padded_block
    values = torch.empty(batches, padded_length, rows, dtype=dtype, device=x.device)
    exponents = torch.empty(batches, padded_length // 2, rows, dtype=torch.int32, device=x.device) if pairs else None
    factors = (None, 0, 0, 0, 0, 1) if scales is None else (scales.values, *scales.values.stride(), scales.low, scales.group)
    if values.numel():
        blocks = (-(-rows // _ROWS) * -(-padded_length // _LENGTH), 1, batches)
        planes_kernel[blocks](
            x, values, exponents, is_wide, count, length, *x.stride(), rows, padded_length, low or 0, block, padded_block, *factors,
            PAIRS=pairs, ROWS=_ROWS, LENGTH=_LENGTH,
        )  # fmt: skip
    return Planes(values, exponents, rows, padded_length)
