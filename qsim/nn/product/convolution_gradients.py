"""The gradient of one operand of a convolution.

Torch takes both operands, although it needs only the shape of the one whose gradient is wanted, and derives the memory format from both. So
the stand-in for that operand has the memory format of the other tensors; otherwise torch would convert them to its format and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from qsim.nn.product import float32

_SCHEMA = f"(Tensor g, Tensor other, SymInt[] shape, bool second, bool exact, {float32.NUMBERS}) -> Tensor"
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def gradient(g: Tensor, other: Tensor, shape: Sequence[int], second: bool, *numbers: Any) -> Tensor:
    """The gradient of an operand, by torch's own `aten::convolution_backward`.

    Args:
        g: The gradient of the result.
        other: The operand whose gradient is not wanted.
        shape: The shape of the operand whose gradient is wanted.
        second: Whether that is the second operand.
        *numbers: The convolution's parameters, as `aten::convolution` takes them.
    """
    order = memory_format(g, other)
    # Torch does not read a stand-in's values. A contiguous one needs no memory, nor does a weight's, whose format by itself converts
    # nothing.
    takes_memory = order != torch.contiguous_format and not second
    stand_in = _empty(g, shape, order) if takes_memory else g.new_empty(1).expand(shape)
    a, w = (other, stand_in) if second else (stand_in, other)
    gradients = torch.ops.aten.convolution_backward(g, a, w, None, *numbers, [not second, second, False])
    return gradients[int(second)]  # type: ignore[no-any-return]


def memory_format(*tensors: Tensor) -> torch.memory_format:
    """Channels last if one of the tensors is channels-last and not contiguous as well."""
    last = _CHANNELS_LAST.get(tensors[0].dim())
    if last is None:
        return torch.contiguous_format
    dims = range(tensors[0].dim())
    in_order, channels_last = tuple(dims), (0, *dims[2:], 1)
    # From strides, because torch does not report the memory format of tensors under vmap, as in batched gradients.
    found = any(_lies_in(x, channels_last) and not _lies_in(x, in_order) for x in tensors)
    return last if found else torch.contiguous_format


def _lies_in(x: Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor is dense, with its dimensions in some order."""
    stride = 1
    for dim in reversed(order):
        if x.shape[dim] != 1:
            if x.stride(dim) != stride:
                return False
            stride *= x.shape[dim]
    return True


def _empty(g: Tensor, shape: Sequence[int], order: torch.memory_format) -> Tensor:
    return torch.empty(list(shape), dtype=g.dtype, device=g.device, memory_format=order)


def _promised(g: Tensor, other: Tensor, shape: Sequence[int], second: bool, exact: bool, *numbers: Any) -> Tensor:
    """`gradient` in the memory format that compilers are promised."""
    with float32.unshortened(g, is_matmul=False) if exact else nullcontext():
        return gradient(g, other, shape, second, *numbers).contiguous(memory_format=memory_format(g, other))


_operator = torch.library.custom_op(
    "qsim::convolution_gradient", _promised, mutates_args=(), schema=_SCHEMA, tags=(torch.Tag.flexible_layout,)
)


@_operator.register_fake
def _(g: Tensor, other: Tensor, shape: Sequence[int], second: bool, exact: bool, *numbers: Any) -> Tensor:
    return _empty(g, shape, memory_format(g, other))


def convolution_gradient(g: Tensor, other: Tensor, shape: Sequence[int], second: bool, exact: bool, *numbers: Any) -> Tensor:
    """`gradient`, for compilers as one operator, which chooses the stand-in at run time, when memory formats are known.

    It is exact if the operands are float32 whose precision must not be reduced.
    """
    if not exact and not torch.compiler.is_compiling():
        return gradient(g, other, shape, second, *numbers)
    return torch.ops.qsim.convolution_gradient.default(g, other, list(shape), second, exact, *numbers)  # type: ignore[no-any-return]
