"""Multiplication of a product by scales left out of its operands, if any, plus a bias, in one read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.reference import scaling as reference
from qsim_kernels.triton.device.regions import narrowed
from qsim_kernels.triton.host.launcher import Launcher

_WIDTH = 1024
#: The dtypes of biases and results that the kernel computes.
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def factor_of(factors, row, column, PLACE: tl.constexpr):
    """The scales of some elements of a row: one for everything, that of the row, or those of the columns."""
    if PLACE == "row":
        found = tl.load(factors + row)
    elif PLACE == "column":
        found = tl.load(factors + column)
    else:
        found = tl.load(factors)
    return found


@triton.jit(do_not_specialize=["rows", "columns"], do_not_specialize_on_alignment=["first", "second", "bias"])
def rescale_kernel(
    product, out, first, second, bias, rows: tl.int64, columns: tl.int64,
    FIRST: tl.constexpr, SECOND: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write part of a row of the result."""
    program, along = tl.program_id(0), tl.cdiv(columns, WIDTH).to(tl.int32)
    row, start = (program // along).to(tl.int64), (program % along).to(tl.int64) * WIDTH
    begin, left = row * columns + start, columns - start
    if EVEN:
        begin, left = tl.multiple_of(begin, 16), tl.multiple_of(left, 16)
    place = tl.arange(0, WIDTH)
    here = place < left
    column = tl.minimum(start + place, columns - 1)
    values = tl.load(product + begin + place, mask=here, other=0)
    if first is not None:
        values *= factor_of(first, row, column, FIRST)
    if second is not None:
        values *= factor_of(second, row, column, SECOND)
    if bias is not None:
        values += tl.load(bias + column).to(tl.float32)
    tl.store(out + begin + place, narrowed(values, out.dtype.element_ty), mask=here)


def rescaled_into(out: Tensor, product: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> None:
    """Write a product times scales; see `reference.scaling.rescaled_into`."""
    places = [_place(factor, product) for factor in factors]
    plain = product.dtype == torch.float32 and product.is_contiguous() and len(factors) <= 2 and 0 < product.numel() < 2**40
    fits = out.dtype in _NARROW and (bias is None or bias.dtype in _NARROW)
    if not plain or not fits or None in places:
        reference.rescaled_into(out, product, factors, bias)
        return
    columns = product.shape[-1]
    rows = product.numel() // columns
    (first, second), (one, other) = [*factors, None, None][:2], [*places, None, None][:2]
    launcher = _rescaler(one, other, columns % 16 == 0, out.dtype)
    given = (first, second, None if bias is None else bias.contiguous(), rows, columns)
    absent = (len(factors), None if bias is None else bias.dtype)
    launcher.launch(rows * -(-columns // _WIDTH), product, out, *given, absent=absent)


def _place(factor: Tensor, product: Tensor) -> str | None:
    """The dimensions of a matrix that a factor applies to; None if it is not float32 and packed, or applies elsewhere."""
    if factor.dtype != torch.float32:
        return None
    if factor.numel() == 1:
        return "all"
    if product.dim() != 2 or not factor.is_contiguous():
        return None
    shapes = {(product.shape[0], 1): "row", (1, product.shape[1]): "column", (product.shape[1],): "column"}
    return shapes.get(tuple(factor.shape))


@lru_cache(maxsize=64)
def _rescaler(first: str | None, second: str | None, even: bool, target: torch.dtype) -> Launcher:
    # The bias is added to a rounded product, as in plain torch.
    return Launcher(rescale_kernel, (), (first, second, even, _WIDTH), _WIDTH, enable_fp_fusion=False)
