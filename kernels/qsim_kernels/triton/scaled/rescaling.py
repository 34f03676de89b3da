"""Multiplication of a product by scales left out of its operands, if any, plus a bias, in one read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.chip.factored import multiplied_into
from qsim_kernels.torch import scaling as reference
from qsim_kernels.triton.device.blocks import narrowed
from qsim_kernels.triton.host.launcher import Launch, launcher

_WIDTH = 1024
#: The dtypes of biases and results that the kernel computes.
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def factor_of(factors, row, column, PLACE: tl.constexpr):
    """The scales of some elements of a row: one for everything, that of the row, or those of the columns."""
    if PLACE == "row":
        return tl.load(factors + row)
    elif PLACE == "column":
        return tl.load(factors + column)
    else:
        return tl.load(factors)


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
    packed = product.is_contiguous() and all(map(Tensor.is_contiguous, factors))
    factor_types = [(factor.shape, factor.dtype) for factor in factors]
    launch = packed and _prepared(product.shape, product.dtype, out.dtype, None if bias is None else bias.dtype, *factor_types)
    if not launch:
        reference.rescaled_into(out, product, factors, bias)
        return
    first, second = (*factors, None, None)[:2]
    launch(product, out, first, second, None if bias is None else bias.contiguous())


def matmul_rescaled_into(out: Tensor, a: Tensor, b: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> None:
    """Write the float32 product of two 16-bit matrices times scales; cuBLAS multiplies by one number before it writes the product."""
    if not multiplied_into(out, a, b, factors, bias):
        rescaled_into(out, torch.mm(a, b, out_dtype=torch.float32), factors, bias)


@lru_cache(maxsize=4096)
def _prepared(
    shape: torch.Size, source: torch.dtype, target: torch.dtype, bias: torch.dtype | None, *factors: tuple[torch.Size, torch.dtype]
) -> Launch | None:
    """Prepare a launch for contiguous tensors, if the kernel supports their dtypes and shapes."""
    places = [_place(factor, shape) for factor, dtype in factors if dtype == torch.float32]
    count = shape.numel()
    fits = source == torch.float32 and target in _NARROW and bias in (None, *_NARROW) and 0 < count < 2**40
    if not fits or None in places or len(places) < len(factors) or len(factors) > 2:
        return None
    columns = shape[-1]
    constants = (*(*places, None, None)[:2], columns % 16 == 0, _WIDTH)
    # The bias is added to a rounded product, as in plain torch.
    run = launcher(rescale_kernel, (target, bias), *constants, enable_fp_fusion=False)
    rows = count // columns
    return Launch(run, rows * -(-columns // _WIDTH), (rows, columns))


def _place(factor: torch.Size, shape: torch.Size) -> str | None:
    """The dimensions of a matrix that a factor applies to; none if it applies elsewhere."""
    if factor.numel() == 1:
        return "all"
    if len(shape) != 2:
        return None
    return {(shape[0], 1): "row", (1, shape[1]): "column", (shape[1],): "column"}.get(tuple(factor))
