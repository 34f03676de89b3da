"""The bilinear operations of layers: how each goes forward, and the two products of its backward pass.

Operands come in their carrier and results leave in the dtype that is asked for; nothing here rounds to a format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.nn.carriers import multiply


class Product(Protocol):
    """An operation that is linear in two operands."""

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The result, with the bias added."""

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient of the first operand."""

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient of the second operand."""

    def grad_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""


@dataclass(frozen=True)
class Linear:
    """`a @ w.T`, over the last dimension of an `a` with any number of others."""

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The result, with the bias added."""
        if a.dtype == dtype:
            return F.linear(a, w, bias)
        result = multiply(_rows(a), w.t(), dtype if bias is None else torch.promote_types(dtype, torch.float32))
        if bias is not None:
            result = (result + bias).to(dtype)
        return result.view(*a.shape[:-1], w.shape[0])

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient of the first operand."""
        return multiply(_rows(g), w, dtype).view(a_shape)

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient of the second operand."""
        return multiply(_rows(g).t(), _rows(a), dtype)

    def grad_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""
        return _rows(g).sum(0)


def _rows(x: Tensor) -> Tensor:
    """All dimensions but the last as one; with -1 for it, torch would refuse rows of no elements."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@dataclass(frozen=True)
class Convolution:
    """A convolution or a transposed one, of an input with a batch dimension, in one, two or three dimensions.

    Attributes:
        stride: One number for each spatial dimension, as are the next three.
        padding: Zeros on both sides.
        dilation: Steps between the kernel's elements.
        output_padding: For transposed ones.
        groups: How many groups the channels fall into.
        transposed: Whether it is one.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The result, with the bias added."""
        a, w = _wide(a, dtype), _wide(w, dtype)
        given = bias if a.dtype == dtype else None
        result = torch.ops.aten.convolution(a, w, given, *self._numbers())
        if bias is not None and given is None:
            result = result + bias.view(-1, *[1] * len(self.stride))
        return result.to(dtype)  # type: ignore[no-any-return]

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient of the first operand."""
        g = _wide(g, dtype)
        like = g.new_empty(1).expand(a_shape)
        return self._backward(g, like, _wide(w, dtype), 0).to(dtype)

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient of the second operand."""
        g = _wide(g, dtype)
        like = g.new_empty(1).expand(w_shape)
        return self._backward(g, _wide(a, dtype), like, 1).to(dtype)

    def grad_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""
        return g.sum([0, *range(2, g.dim())])

    def _backward(self, g: Tensor, a: Tensor, w: Tensor, which: int) -> Tensor:
        mask = [which == 0, which == 1, False]
        return torch.ops.aten.convolution_backward(g, a, w, None, *self._numbers(), mask)[which]  # type: ignore[no-any-return]

    def _numbers(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        return list(self.stride), list(self.padding), list(self.dilation), self.transposed, list(self.output_padding), self.groups


def _wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand of a convolution, whose result is rounded to its operands' dtype: 16 bits will do only if they are what is asked for."""
    return x if x.dtype == dtype or x.element_size() > 2 else x.float()


@dataclass(frozen=True)
class Matmul:
    """`a @ b` of matrices or batches of them, batch dimensions being broadcast."""

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The result; there is no bias."""
        return _batched(a, w, dtype)

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient of the first operand."""
        return _summed(g, w.mT, a_shape, dtype)

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient of the second operand."""
        if len(w_shape) == 2:
            return multiply(_rows(a).t(), _rows(g), dtype)
        return _summed(a.mT, g, w_shape, dtype)

    def grad_bias(self, g: Tensor) -> Tensor:
        """There is none."""
        raise NotImplementedError


def _batched(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A product of batches of matrices; those that share their second operand are multiplied as one."""
    if b.dim() == 2:
        return multiply(_rows(a), b, dtype).view(*a.shape[:-1], b.shape[-1])
    if a.dtype == dtype:
        return multiply(a, b, dtype)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    a3 = a.expand(*batch, *a.shape[-2:]).reshape(count, *a.shape[-2:])
    b3 = b.expand(*batch, *b.shape[-2:]).reshape(count, *b.shape[-2:])
    return multiply(a3, b3, dtype).view(*batch, a.shape[-2], b.shape[-1])


def _summed(a: Tensor, b: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A product that is summed over the batches to which its operand was broadcast, before it is rounded to 16 bits."""
    broadcast = shape[:-2] != torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    result = _batched(a, b, torch.promote_types(dtype, torch.float32) if broadcast else dtype)
    return result.sum_to_size(shape).to(dtype)
