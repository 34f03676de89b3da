"""Products of 16-bit matrices times numbers on the GPU, plus a bias, rounded once from float32 sums.

Torch's own products take such numbers for 8-bit operands only. With them a float32 product would be written to memory, read again and
multiplied there, which adds a sixth to the time of a large product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from qsim_kernels.chip import cublas
from qsim_kernels.chip.cublas import CublasProduct, Stored
from qsim_kernels.private import current_device as _current_device, current_stream as _current_stream
from qsim_kernels.torch.persistent import persistent

#: One thread at a time gives cuBLAS the address of a bias and launches the product.
_turn = Lock()
#: The number 0 on each GPU.
_zeros: dict[int, Tensor] = {}


def multiplied_into(out: Tensor, a: Tensor, b: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> bool:
    """Write `a @ b`, times one or two numbers, plus a bias; return whether cuBLAS has such a product.

    Of two numbers it takes their product in float32.

    Args:
        out: A contiguous matrix.
        a: A matrix.
        b: Another one.
        factors: The numbers, which are tensors of one element.
        bias: What is added to each row, if anything.
    """
    device = a.get_device()
    if device != _current_device():
        with torch.cuda.device(device):
            return multiplied_into(out, a, b, factors, bias)
    product = product_of(a, b, factors, bias, out.dtype)
    pointers = b.data_ptr(), a.data_ptr(), out.data_ptr()
    biased = None if bias is None else bias.data_ptr()
    if product is None or (pointers[0] | pointers[1] | pointers[2] | (biased or 0)) % cublas.ALIGNMENT:
        return False
    zero = _zeros.get(device)
    if zero is None:
        if torch.cuda.is_current_stream_capturing():  # nothing is written now, only in replays
            return False
        zero = _zeros.setdefault(device, persistent(0.0, torch.float32, a.device))
    number = factors[0] if len(factors) == 1 else factors[0] * factors[1]
    workspace = a.new_empty(product.workspace_bytes, dtype=torch.uint8) if product.workspace_bytes else None
    with _turn:
        product.launch(
            *pointers,
            number=number.data_ptr(),
            zero=zero.data_ptr(),
            bias=biased,
            workspace=None if workspace is None else workspace.data_ptr(),
            stream=_current_stream(device),
        )
    return True


def product_of(a: Tensor, b: Tensor, factors: Sequence[Tensor], bias: Tensor | None, target: torch.dtype) -> CublasProduct | None:
    """The product of two matrices, times numbers, plus a bias, if cuBLAS has it; only the tensors' dtypes and layouts matter."""
    scaled = tuple((factor.dtype, factor.numel()) for factor in factors)
    added = None if bias is None else (bias.dtype, bias.stride())
    return _product(a.get_device(), (a.dtype, a.shape, a.stride()), (b.dtype, b.shape, b.stride()), scaled, added, target)


#: A matrix's dtype, shape and strides.
_Matrix = tuple[torch.dtype, torch.Size, tuple[int, ...]]


@lru_cache(maxsize=4096)
def _product(
    device: int, a: _Matrix, b: _Matrix, factors: tuple[Any, ...], bias: tuple[torch.dtype, tuple[int, ...]] | None, target: torch.dtype
) -> CublasProduct | None:
    """The product of such tensors on a device, if cuBLAS has it."""
    (dtype, (rows, length), _), (other_dtype, (_, columns), _) = a, b
    left, right = _stored(*a), _stored(*b)
    if left is None or right is None or not rows * length * columns or not cublas.is_loaded():
        return None
    if dtype != other_dtype or dtype not in (torch.bfloat16, torch.float16) or target not in (dtype, torch.float32):
        return None
    if len(factors) not in (1, 2) or set(factors) != {(torch.float32, 1)} or bias not in (None, (target, (1,))):
        return None
    # cuBLAS reads and writes by columns: it computes the transpose of the result, whose left operand is the right one.
    product = CublasProduct(*right, *left, Stored(target, columns, rows, columns), adds_bias=bias is not None)
    return product if product.exists else None


def _stored(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> tuple[Stored, bool] | None:
    """A matrix as cuBLAS reads it, by columns, and whether this is the matrix and not its transpose; `None` for other strides."""
    (rows, columns), (down, along) = shape, strides
    if along == 1 and down >= columns:
        return Stored(dtype, columns, rows, down), False
    return (Stored(dtype, rows, columns, along), True) if down == 1 and along >= rows else None
