"""Products of 16-bit matrices times numbers that lie on the GPU, plus a bias, rounded once from float32 sums.

Torch's own products take such numbers for 8-bit operands only. With them a float32 product would be written to memory, read again and
multiplied there, which takes a fifth of the time of a large product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from qsim_kernels.chip import cublas
from qsim_kernels.chip.cublas import Product, Stored

#: One thread at a time tells cuBLAS the address of a bias and launches the product.
_turn = Lock()
#: The number 0 on each GPU.
_zeros: dict[int, Tensor] = {}


def multiplied_into(out: Tensor, a: Tensor, b: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> bool:
    """Write `a @ b`, times one or two numbers, plus a bias; return whether cuBLAS has such a product.

    Two numbers are multiplied with each other first, in float32.

    Args:
        out: A contiguous matrix.
        a: A matrix.
        b: Another one.
        factors: The numbers, which are tensors of one element.
        bias: What is added to each row, if anything.
    """
    left, right = _stored(a), _stored(b)
    if left is None or right is None or not _takes(out, a, b, factors, bias):
        return False
    device = a.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return multiplied_into(out, a, b, factors, bias)
    zero = _zeros.get(device)
    if zero is None:
        if torch.cuda.is_current_stream_capturing():  # it would be zero only when the graph is replayed
            return False
        zero = _zeros[device] = a.new_zeros((), dtype=torch.float32)
    product = _product(device, left, right, out.dtype, bias is not None)
    if not product.exists:
        return False
    number = factors[0] if len(factors) == 1 else factors[0] * factors[1]
    workspace = a.new_empty(product.workspace_bytes, dtype=torch.uint8)
    with _turn:
        product.launch(
            *(b.data_ptr(), a.data_ptr(), out.data_ptr()),
            number=number.data_ptr(),
            zero=zero.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            workspace=workspace.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
        )
    return True


def _takes(out: Tensor, a: Tensor, b: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> bool:
    """Whether tensors have dtypes, sizes and addresses of products that cuBLAS may have."""
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16) or out.dtype not in (a.dtype, torch.float32):
        return False
    if len(factors) not in (1, 2) or not all(factor.numel() == 1 and factor.dtype == torch.float32 for factor in factors):
        return False
    if bias is not None and (bias.dtype != out.dtype or not bias.is_contiguous()):
        return False
    tensors = (out, a, b) if bias is None else (out, a, b, bias)
    return all(x.numel() and x.data_ptr() % cublas.ALIGNMENT == 0 for x in tensors) and cublas.is_loaded()


def _stored(x: Tensor) -> tuple[Stored, bool] | None:
    """A matrix in memory, and whether cuBLAS, which reads by columns, sees itself and not its transpose; `None` for other strides."""
    (rows, columns), (down, along) = x.shape, x.stride()
    if along == 1 and down >= columns:
        return Stored(x.dtype, columns, rows, down), False
    return (Stored(x.dtype, rows, columns, along), True) if down == 1 and along >= rows else None


@lru_cache(maxsize=1024)
def _product(device: int, left: tuple[Stored, bool], right: tuple[Stored, bool], dtype: torch.dtype, adds_bias: bool) -> Product:
    """The product on a device, as cuBLAS sees it: the transpose of the result, whose left operand is the right one."""
    (a, turns_a), (b, turns_b) = left, right
    rows, columns = (a.rows if turns_a else a.columns), (b.columns if turns_b else b.rows)
    return Product(b, turns_b, a, turns_a, Stored(dtype, columns, rows, columns), adds_bias)
