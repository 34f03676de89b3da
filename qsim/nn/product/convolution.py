"""Convolutions as bilinear operations, transposed ones included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qsim.nn.product import float32
from qsim.nn.product.arithmetic import Arithmetic, in_dtype, rescaled
from qsim.nn.product.convolution_gradients import convolution_gradient
from qsim.nn.product.directions import CONVOLUTION, TRANSPOSED, Directions


@dataclass(frozen=True)
class Convolution:
    """A convolution or a transposed one, of an input with a batch dimension, in one, two or three dimensions.

    Attributes:
        stride: One number for each spatial dimension, as are the next three.
        padding: Zeros on both sides.
        dilation: Steps between the kernel's elements.
        output_padding: For transposed ones.
        groups: Number of groups of channels.
        transposed: Whether it is a transposed convolution.
    """

    gradient_first: ClassVar[bool] = True
    sums_rows: ClassVar[bool] = False

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def directions(self) -> Directions:
        """Channels are summed over, and samples for the gradient of the weight."""
        return TRANSPOSED if self.transposed else CONVOLUTION

    def merges_rows(self, dims: int) -> bool:
        """Every dimension counts separately."""
        return False

    def narrow_carrier(self, dtype: torch.dtype) -> torch.dtype | None:
        """Torch's convolutions round their results to their operands' dtype."""
        return dtype if dtype.itemsize == 2 else torch.float32

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, how: Arithmetic) -> Tensor:
        """The result, with the bias added."""
        given = bias if a.dtype == how.dtype and not how.factors else None
        convolution = float32.convolution if how.exact else torch.ops.aten.convolution
        result = _times(convolution(a, w, given, *self._numbers()), how)
        if bias is not None and given is None:
            result = result + bias.view(-1, *[1] * len(self.stride))
        return in_dtype(result, how.dtype)

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, how: Arithmetic) -> Tensor:
        """The gradient of the first operand."""
        return _times(self._gradient(g, w, a_shape, False, how.exact), how).to(how.dtype)

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:
        """The gradient of the second operand."""
        return _times(self._gradient(g, a, w_shape, True, how.exact), how).to(how.dtype)

    def grad_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias."""
        return g.sum([0, *range(2, g.dim())])

    def _gradient(self, g: Tensor, other: Tensor, shape: torch.Size, second: bool, exact: bool) -> Tensor:
        """The gradient of one operand, from the other one."""
        gradient = float32.convolution_gradient if exact else convolution_gradient
        return gradient(g, other, list(shape), second, *self._numbers())

    def _numbers(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        return list(self.stride), list(self.padding), list(self.dilation), self.transposed, list(self.output_padding), self.groups


def _times(result: Tensor, how: Arithmetic) -> Tensor:
    """A convolution's result times its factors, in at least float32."""
    if not how.factors:
        return result
    wide = how.widened().dtype
    return rescaled(result.to(wide), how.factors, wide)
