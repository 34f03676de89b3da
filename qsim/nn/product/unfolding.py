"""Convolutions as products of matrices, which define the order in which an accumulator adds.

The rows of one matrix are the windows of an image that a kernel sees. A sum goes through the positions of the kernel, and at each through
the channels, as the implicit products of channels-last convolutions do on GPUs; zeros of padding are terms like any others. The gradient of
an input is such a sum over kernel and output channels: its windows are those of the gradient with zeros between its elements, where the
stride skipped some. The gradient of a weight is a sum over samples, and in each over the positions of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

#: Multiplies matrices `[…, M, K]` and `[…, K, N]`.
Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Unfolding:
    """A convolution of images `[samples, channels, *sizes]` with kernels `[out, channels of a group, *kernel]`, none transposed.

    Attributes:
        stride: One number for each spatial dimension, as are the next two.
        padding: Zeros on both sides.
        dilation: Steps between the kernel's elements.
        groups: Number of groups of channels.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def result(self, x: Tensor, w: Tensor, sizes: Sequence[int] | None, multiply: Multiply) -> Tensor:
        """The convolution of images with kernels, or its first positions."""
        windows = self._windows(x, w.shape[2:], sizes)
        weights = w.unflatten(0, (self.groups, -1)).movedim((2, 1), (-2, -1)).flatten(1, -2)
        return self._images(_products(self._rows(windows), weights, multiply), x.shape[0], windows.shape[2 : 2 + len(self.stride)])

    def of_input(self, g: Tensor, w: Tensor, sizes: Sequence[int], multiply: Multiply) -> Tensor:
        """The gradient of images of some sizes."""
        weights = w.unflatten(0, (self.groups, -1)).movedim((1, 2), (-2, -1)).flatten(1, -2)
        windows = self._spread_windows(g, w.shape[2:], sizes)
        return self._images(_products(self._rows(windows), weights, multiply), g.shape[0], sizes)

    def of_kernels(self, g: Tensor, x: Tensor, kernel: Sequence[int], multiply: Multiply, images_first: bool = False) -> Tensor:
        """The gradient of kernels, as the product of the result's gradient and the images, or the other way round."""
        gradient, windows = self._rows(g), self._rows(self._windows(x, kernel, g.shape[2:]))
        pair = (windows.mT, gradient) if images_first else (gradient.mT, windows)
        found = _products(*pair, multiply)
        lines = found.mT if images_first else found
        return lines.reshape(*lines.shape[:2], *kernel, x.shape[1] // self.groups).movedim(-1, 2).flatten(0, 1)

    def _windows(self, x: Tensor, kernel: Sequence[int], sizes: Sequence[int] | None) -> Tensor:
        """`[samples, channels, *positions, *kernel]`, for the first few positions or all."""
        padded = F.pad(x, [side for amount in reversed(self.padding) for side in (amount, amount)])
        windows = _windows(padded, kernel, self.stride, self.dilation)
        for dim, size in enumerate(sizes or (), start=2):
            windows = windows.narrow(dim, 0, size)
        return windows

    def _spread_windows(self, g: Tensor, kernel: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The windows of a result's gradient from which each element of an image gets its own, in the order of the kernel."""
        spread = [step * (count - 1) + 1 if count else 0 for step, count in zip(self.stride, g.shape[2:], strict=True)]
        held = g.new_zeros(*g.shape[:2], *spread)
        places: tuple[Any, ...] = (..., *(slice(None, None, step) for step in self.stride))
        held[places] = g
        reach = [gap * (size - 1) for gap, size in zip(self.dilation, kernel, strict=True)]
        before = [most - padding for most, padding in zip(reach, self.padding, strict=True)]
        after = [size + most - left - count for size, most, left, count in zip(sizes, reach, before, spread, strict=True)]
        padded = F.pad(held, [side for pair in reversed(list(zip(before, after, strict=True))) for side in pair])
        return _windows(padded, kernel, (1,) * len(kernel), self.dilation).flip(list(range(-len(kernel), 0)))

    def _rows(self, windows: Tensor) -> Tensor:
        """Windows, or elements without kernels, as matrices of groups: samples and positions down, kernel and channels along."""
        dims = len(self.stride)
        split: Tensor = windows.unflatten(1, (self.groups, -1)).movedim((1, 2), (0, -1))
        return split.reshape(self.groups, math.prod(split.shape[1 : 2 + dims]), math.prod(split.shape[2 + dims :]))

    def _images(self, matrices: Tensor, samples: int, sizes: Sequence[int]) -> Tensor:
        """The reverse of `_rows`, for elements without kernels."""
        split = matrices.view(self.groups, samples, *sizes, matrices.shape[-1])
        images: Tensor = split.movedim((0, -1), (1, 2)).flatten(1, 2)
        return images


def _windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    for dim, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, gap * (size - 1) + 1, step)[..., ::gap]
    return x


def _products(a: Tensor, b: Tensor, multiply: Multiply) -> Tensor:
    """The products of each group's matrices; a single group has two dimensions."""
    return multiply(a, b) if len(a) > 1 else multiply(a[0], b[0]).unsqueeze(0)
