"""Launches of the products of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from qsim_kernels.triton.grouped.kernels import columns_kernel, rows_kernel


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
    return _LARGE if not out.is_cuda or torch.cuda.get_device_capability(out.device)[0] in _ROOMY else _SMALL


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
