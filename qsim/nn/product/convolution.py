"""Convolutions as bilinear operations, transposed ones included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qsim.nn.product import float32
from qsim.nn.product.arithmetic import Arithmetic, in_dtype, multiply, rescaled
from qsim.nn.product.bilinear import Product
from qsim.nn.product.carriers import ProductCarrier, Values, product_carrier
from qsim.nn.product.convolution_gradients import convolution_gradient
from qsim.nn.product.unfolding import Multiply, Unfolding


@dataclass(frozen=True)
class ConvolutionProduct(Product):
    """A convolution or a transposed one, of an input with a batch dimension, in one, two or three dimensions.

    Attributes:
        stride: One number for each spatial dimension, as are the next three.
        padding: Zeros on both sides.
        dilation: Steps between the kernel's elements.
        output_padding: For transposed ones.
        groups: Number of groups of channels.
        transposed: Whether it is a transposed convolution.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool

    joins_gradients: ClassVar[bool] = True

    @property
    def equation(self) -> str:  # type: ignore[override]
        """Samples and channels: channels are summed over, and samples for the gradient of the weight."""
        return "ni,io->no" if self.transposed else "ni,oi->no"

    @property
    def constant(self) -> Any:
        """The attributes; output paddings follow from sizes, if these are given."""
        numbers = self.stride, self.padding, self.dilation, self.output_padding, self.groups, self.transposed
        return None if self.transposed else ("convolution", *numbers)

    def carrier(self, index: int, one: Values, other: Values, result: torch.dtype, device: torch.device) -> ProductCarrier:
        """The carrier; of 16 bits only for results of that dtype, because torch's convolutions round these to their operands' dtype."""
        return product_carrier(one, other, device, result if result.itemsize == 2 else torch.float32)

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        if how.sum is not None:
            return _finished(self._sum(a, w, how), how, bias)
        given = bias if a.dtype == how.dtype and not how.factors else None
        convolution = float32.convolution if how.exact else torch.ops.aten.convolution
        return _finished(convolution(a, w, given, *self._numbers()), how, None if given is bias else bias)

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        if how.sum is None:
            return self._gradient(g, w, a_shape, how, second=False)
        gradient = self._unfolding.result if self.transposed else self._unfolding.of_input
        return _finished(gradient(g, w, a_shape[2:], _by_adder(how)), how)

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        if how.sum is None:
            return self._gradient(g, a, w_shape, how, second=True)
        images, gradient = (g, a) if self.transposed else (a, g)
        found = self._unfolding.of_kernels(gradient, images, w_shape[2:], _by_adder(how), images_first=self.transposed)
        return _finished(found, how)

    def gradients(self, g: Tensor, w: Tensor, a: Tensor, first: Arithmetic, second: Arithmetic) -> tuple[Tensor, Tensor]:
        """The gradients of both operands from one operator, as without rounding."""
        of_a, of_w, _ = torch.ops.aten.convolution_backward(g, a, w, None, *self._numbers(), [True, True, False])
        return _finished(of_a, first), _finished(of_w, second)

    def grad_bias(self, g: Tensor) -> Tensor:  # noqa: D102 (documented above)
        return g.sum([0, *range(2, g.dim())])

    @property
    def _unfolding(self) -> Unfolding:
        return Unfolding(self.stride, self.padding, self.dilation, self.groups)

    def _sum(self, a: Tensor, w: Tensor, how: Arithmetic) -> Tensor:
        """The result by an accumulator, before factors."""
        if not self.transposed:
            return self._unfolding.result(a, w, None, _by_adder(how))
        numbers = zip(a.shape[2:], self.stride, self.padding, self.dilation, w.shape[2:], self.output_padding, strict=True)
        sizes = [(count - 1) * step - 2 * padding + gap * (size - 1) + more + 1 for count, step, padding, gap, size, more in numbers]
        return self._unfolding.of_input(a, w, sizes, _by_adder(how))

    def _gradient(self, g: Tensor, other: Tensor, shape: torch.Size, how: Arithmetic, *, second: bool) -> Tensor:
        """The gradient of one operand, from the other one."""
        return _finished(convolution_gradient(g, other, shape, second, how.exact, *self._numbers()), how)

    def _numbers(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        return list(self.stride), list(self.padding), list(self.dilation), self.transposed, list(self.output_padding), self.groups


def _by_adder(how: Arithmetic) -> Multiply:
    """Products of matrices by the accumulator; before factors and biases they must not be rounded to 16 bits."""
    wide = how.widened()
    return lambda a, b: multiply(a, b, wide)


def _finished(result: Tensor, how: Arithmetic, bias: Tensor | None = None) -> Tensor:
    """A convolution's result times its factors and plus a bias, both in at least float32, in its dtype."""
    if how.factors:
        wide = how.widened().dtype
        result = rescaled(result.to(wide), how, wide)
    if bias is not None:
        result = result + bias.view(-1, *[1] * (result.dim() - 2))
    return in_dtype(result, how.dtype)
