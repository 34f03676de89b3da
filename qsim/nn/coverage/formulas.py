"""Multiply-adds of operators, given their arguments: of products that torch's FLOP counter does not count, or not as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Formula = Callable[..., int]
Shape = Sequence[int]


def conv_tbc(a: Tensor, w: Tensor, bias: Tensor, pad: int = 0) -> int:
    """A convolution over the first dimension."""
    return (a.shape[0] + 2 * pad - w.shape[0] + 1) * a.shape[1] * math.prod(w.shape)


def matmul(a: Tensor, b: Tensor, *rest: Any) -> int:
    """`torch.matmul` of vectors, matrices or batches of them."""
    rows, columns = (a.shape[-2] if a.dim() > 1 else 1), (b.shape[-1] if b.dim() > 1 else 1)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return math.prod((*batch, rows, a.shape[-1], columns))


def added(summand: Tensor, a: Tensor, b: Tensor, *rest: Any) -> int:
    """The product in a sum."""
    return matmul(a, b)


def grouped(a: Tensor, b: Tensor, *rest: Any) -> int:
    """A product per group: the rows of `a`, or the dimension that is summed over, are divided among the groups."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """Scores, and values times their softmax."""
    return math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    """The scores again, and the gradients of scores, queries, keys and values."""
    return math.prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def trilinear(a: Tensor, w: Tensor, b: Tensor, *added: Any) -> int:
    """`torch.nn.functional.bilinear` and its gradients, for each pair of elements with its weight."""
    shapes = []
    for operand, dims in zip((a, w, b), added, strict=False):
        for dim in dims:
            operand = operand.unsqueeze(dim)
        shapes.append(operand.shape)
    return math.prod(torch.broadcast_shapes(*shapes))


def recurrent(x: Tensor, *weights: Any) -> int:
    """A fused layer: every step multiplies by all matrices. cuDNN takes a list of weights, oneDNN two matrices and two biases."""
    given = weights[0] if isinstance(weights[0], Sequence) else weights[:2]
    steps, each = math.prod(x.shape[:-1]), sum(int(w.numel()) for w in given if w.dim() == 2)
    return steps * each


def twice(count: Formula) -> Formula:
    """A backward pass with two products for each of the forward pass."""
    return lambda *args: 2 * count(*args)


def _convolution(a: Shape, w: Shape, out: Shape, transposed: bool) -> int:
    """A convolution, or one of its two gradients, which multiply the same pairs of elements; as in torch, padding counts."""
    return a[0] * math.prod((a if transposed else out)[2:]) * math.prod(w)


def convolution_backward(g: Tensor, a: Tensor, w: Tensor, *rest: Any) -> int:
    """Both gradients, or one. Torch's formula counts the weight's gradient of a grouped convolution as if there was one group."""
    transposed, needed = rest[4], sum(map(int, rest[7][:2]))
    return needed * _convolution(a.shape, w.shape, g.shape, transposed)


def _convolution_gradient(g: Tensor, other: Tensor, shape: Shape, second: bool, exact: bool, *numbers: Any) -> int:
    """One gradient, by qsim's operator."""
    a, w = (other.shape, shape) if second else (shape, other.shape)
    return _convolution(a, w, g.shape, numbers[3])


#: Those of qsim's operators.
OWN: dict[str, Formula] = {
    **dict.fromkeys(("qsim::float32_matmul", "qsim::accumulate", "qsim::accumulate_scaled", "qsim::matmul_rescaled"), matmul),
    **dict.fromkeys(("qsim::grouped_matmul", "qsim::grouped_accumulate"), grouped),
    "qsim::convolution_gradient": _convolution_gradient,
}
