"""Multiply-adds of operators, by torch's formulas for its FLOP counter, and by own ones for products that it does not count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

from qsim_kernels.ops.accumulate import multiplied_by

Formula = Callable[..., int]
Shape = Sequence[int]


def multiply_adds(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int | None:
    """The multiply-adds of one call of an operator; `None` if it is not known to multiply."""
    name = _out_of_place(operator)
    if name in _OF_MATRICES:
        return _matmul(*operands(operator, args))
    if name in _OWN:
        return _OWN[name](*args)
    formula = flop_counter.flop_registry.get(torch.ops.aten.convolution if name == "qsim::float32_convolution" else operator)
    return None if formula is None else formula(*args, **kwargs, out_val=result) // 2


def operands(operator: Any, args: Sequence[Any]) -> list[Tensor]:
    """The tensors that an operator multiplies, without biases and results that it takes, too."""
    name = _out_of_place(operator)
    if name == "aten::convolution_backward":
        needs_input, needs_weight = args[10][:2]
        chosen = [args[0], *([args[1]] if needs_weight else []), *([args[2]] if needs_input else [])]
    elif name in _SUMS_WITH_PRODUCTS:
        chosen = list(args[1:3])
    elif "attention" in name:
        chosen = list(args[: 4 if "backward" in name else 3])
    else:
        chosen = list(args[: 3 if name == "aten::_trilinear" else 2])
    return [x for x in tree_leaves(chosen) if isinstance(x, Tensor)]


def products_of(operator: Any, args: Sequence[Any], count: int) -> list[list[Tensor]]:
    """The tensors that an operator multiplies, for each of its products: one, or the two gradients of a convolution."""
    multiplied = operands(operator, args)
    if count == 1:
        return [multiplied]
    g, a, w = multiplied
    return [[g, w], [g, a]]


def multiplier(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Who computed a product with an accumulator, the chip or its emulator; empty for others."""
    return multiplied_by(*args, **kwargs) if _name(operator) == "qsim::accumulate" else ""


def _name(operator: Any) -> str:
    return getattr(operator, "_qualified_op_name", "") or str(operator)


def _out_of_place(operator: Any) -> str:
    """The name of an operator, or of the one that it applies in place."""
    return _name(operator).removesuffix("_")


def _conv_tbc(a: Tensor, w: Tensor, bias: Tensor, pad: int = 0) -> int:
    """A convolution over the first dimension."""
    return (a.shape[0] + 2 * pad - w.shape[0] + 1) * a.shape[1] * math.prod(w.shape)


def _matmul(a: Tensor, b: Tensor) -> int:
    """`torch.matmul` of vectors, matrices or batches of them."""
    rows, columns = (a.shape[-2] if a.dim() > 1 else 1), (b.shape[-1] if b.dim() > 1 else 1)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return math.prod((*batch, rows, a.shape[-1], columns))


def _grouped(a: Tensor, b: Tensor, *rest: Any) -> int:
    """A product per group: the rows of `a`, or the dimension that is summed over, are divided among the groups."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """Scores, and values times their softmax."""
    return math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """The scores again, and the gradients of scores, queries, keys and values."""
    return math.prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def _trilinear(a: Tensor, w: Tensor, b: Tensor, *added: Any) -> int:
    """`torch.nn.functional.bilinear` and its gradients, for each pair of elements with its weight."""
    shapes = []
    for operand, dims in zip((a, w, b), added, strict=False):
        for dim in dims:
            operand = operand.unsqueeze(dim)
        shapes.append(operand.shape)
    return math.prod(torch.broadcast_shapes(*shapes))


def _recurrent(x: Tensor, *weights: Any) -> int:
    """A fused layer: every step multiplies by all matrices. cuDNN takes a list of weights, oneDNN two matrices and two biases."""
    given = weights[0] if isinstance(weights[0], Sequence) else weights[:2]
    steps, each = math.prod(x.shape[:-1]), sum(int(w.numel()) for w in given if w.dim() == 2)
    return steps * each


def _convolution(a: Shape, w: Shape, out: Shape, transposed: bool) -> int:
    """A convolution, or one of its two gradients, which multiply the same pairs of elements; as in torch, padding counts."""
    return flop_counter.conv_flop_count(list(a), list(w), list(out), transposed=transposed) // 2


def _convolution_backward(g: Tensor, a: Tensor, w: Tensor, *rest: Any) -> int:
    """Both gradients, or one. Torch's formula counts the weight's gradient of a grouped convolution as if there was one group."""
    transposed, needed = rest[4], sum(map(int, rest[7][:2]))
    return needed * _convolution(a.shape, w.shape, g.shape, transposed)


def _convolution_gradient(g: Tensor, other: Tensor, shape: Shape, second: bool, *numbers: Any) -> int:
    """One gradient, by qsim's operator."""
    a, w = (other.shape, shape) if second else (shape, other.shape)
    return _convolution(a, w, g.shape, numbers[3])


#: Torch's formulas do not take the overloads of these with a dtype of the result, which layers use on GPUs.
_MATRICES = {f"aten::{name}" for name in ("mm", "bmm", "mv", "dot", "vdot")}
_SUMS_WITH_PRODUCTS = {f"aten::{name}" for name in ("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation")}
_OWN_OF_MATRICES = {f"qsim::{name}" for name in ("float32_matmul", "accumulate", "accumulate_scaled", "matmul_rescaled")}
_OF_MATRICES = _OWN_OF_MATRICES | _MATRICES | _SUMS_WITH_PRODUCTS
_OWN: dict[str, Formula] = {
    "aten::convolution_backward": _convolution_backward,
    "aten::_grouped_mm": _grouped,
    "qsim::grouped_matmul": _grouped,
    "qsim::grouped_accumulate": _grouped,
    "aten::_trilinear": _trilinear,
    "aten::conv_tbc": _conv_tbc,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": lambda *args: 2 * _recurrent(*args),
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": lambda *args: 2 * _recurrent(*args),
    "qsim::float32_convolution_gradient": _convolution_gradient,
}
