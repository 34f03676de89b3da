"""The gradient of one operand of a convolution.

Torch asks for both operands, though of the one whose gradient is wanted it needs the shape alone, and looks at both to tell how tensors lie
in memory. So the stand-in for that one lies as the other tensors do; otherwise torch would turn them to its order and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Arguments of convolutions behind their tensors.
NUMBERS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
SCHEMA = f"(Tensor g, Tensor other, SymInt[] shape, bool second, {NUMBERS}) -> Tensor"
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def gradient(g: Tensor, other: Tensor, shape: Sequence[int], second: bool, *numbers: Any) -> Tensor:
    """The gradient of an operand, by torch's own `aten::convolution_backward`.

    Args:
        g: The gradient of the result.
        other: The operand whose gradient is not wanted.
        shape: Of the operand whose gradient is wanted.
        second: Whether that is the second one.
        *numbers: The convolution's, as `aten::convolution` takes them.
    """
    order = memory_format(g, other)
    # Of a weight torch takes nothing but the shape, and of an input in order: no memory need be spent on them.
    takes_memory = order != torch.contiguous_format and not second
    stand_in = _empty(g, shape, order) if takes_memory else g.new_empty(1).expand(shape)
    a, w = (other, stand_in) if second else (stand_in, other)
    found: Tensor = torch.ops.aten.convolution_backward(g, a, w, None, *numbers, [not second, second, False])[int(second)]
    return found.contiguous(memory_format=order)


def memory_format(*tensors: Tensor) -> torch.memory_format:
    """That of the result: channels come last if they do in one of the tensors."""
    last = _CHANNELS_LAST.get(tensors[0].dim())
    if last is not None and any(x.is_contiguous(memory_format=last) and not x.is_contiguous() for x in tensors):
        return last
    return torch.contiguous_format


def fake_gradient(g: Tensor, other: Tensor, shape: Sequence[int], second: bool, *numbers: Any) -> Tensor:
    """What `gradient` gives, without numbers."""
    return _empty(g, shape, memory_format(g, other))


def _empty(g: Tensor, shape: Sequence[int], order: torch.memory_format) -> Tensor:
    return torch.empty(list(shape), dtype=g.dtype, device=g.device, memory_format=order)


_compiled = torch.library.custom_op(
    "qsim::convolution_gradient", gradient, mutates_args=(), schema=SCHEMA, tags=(torch.Tag.flexible_layout,)
)
_compiled.register_fake(fake_gradient)


def convolution_gradient(g: Tensor, other: Tensor, shape: Sequence[int], second: bool, *numbers: Any) -> Tensor:
    """`gradient`; to a compiler it is one operator, which chooses its stand-in when it runs and it is known how tensors lie in memory."""
    chosen = torch.ops.qsim.convolution_gradient.default if torch.compiler.is_compiling() else gradient
    return chosen(g, other, list(shape), second, *numbers)
