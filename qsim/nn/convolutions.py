"""torch.nn.functional's convolutions and transposed ones, rounded at five points."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.functional.tracing import refuse_tracing
from qsim.nn.product.autograd import planned
from qsim.nn.product.checks import check_bias, check_groups
from qsim.nn.product.convolution import ConvolutionProduct
from qsim.nn.product.plans import plan_for
from qsim.random.sources import Stream
from qsim.recipes.points_of import PointsLike, points_of

Sizes = int | tuple[int, ...]
_known_product = lru_cache(maxsize=4096)(ConvolutionProduct)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    points: PointsLike = None,
    *,
    stream: Stream = 0,
) -> Tensor:
    """`torch.nn.functional.conv1d` with its operands and gradients rounded.

    Example:
        >>> import torch, qsim
        >>> qsim.nn.functional.conv1d(torch.full((1, 1, 3), 1.1), torch.ones(1, 1, 2), points=qsim.FivePoint(act="e2m1"))
        tensor([[[2., 2.]]])
    """
    return convolve(1, x, weight, bias, stride, padding, dilation, groups, points, stream)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    points: PointsLike = None,
    *,
    stream: Stream = 0,
) -> Tensor:
    """`torch.nn.functional.conv2d` with its operands and gradients rounded.

    Example:
        >>> import torch, qsim
        >>> x, w = torch.tensor([1.0, 3.3]).view(1, 1, 1, 2), torch.tensor([0.3, 1.0]).view(1, 1, 1, 2)
        >>> qsim.nn.functional.conv2d(x, w, points=qsim.FivePoint(act="e4m3", weight="e4m3")).flatten()
        tensor([3.5625])
    """
    return convolve(2, x, weight, bias, stride, padding, dilation, groups, points, stream)


def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    points: PointsLike = None,
    *,
    stream: Stream = 0,
) -> Tensor:
    """`torch.nn.functional.conv3d` with its operands and gradients rounded.

    Example:
        >>> import torch, qsim
        >>> x, w = torch.tensor([1.0, 3.3]).view(1, 1, 1, 1, 2), torch.tensor([0.3, 1.0]).view(1, 1, 1, 1, 2)
        >>> qsim.nn.functional.conv3d(x, w, points=qsim.FivePoint(act="e4m3", weight="e4m3")).flatten()
        tensor([3.5625])
    """
    return convolve(3, x, weight, bias, stride, padding, dilation, groups, points, stream)


def conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    points: PointsLike = None,
    *,
    stream: Stream = 0,
) -> Tensor:
    """`torch.nn.functional.conv_transpose1d` with its operands and gradients rounded.

    Example:
        >>> import torch, qsim
        >>> x, w = torch.tensor([1.0, 3.3]).view(1, 1, 2), torch.tensor([0.3, 1.0]).view(1, 1, 2)
        >>> qsim.nn.functional.conv_transpose1d(x, w, points=qsim.FivePoint(act="e4m3", weight="e4m3")).flatten()
        tensor([0.3125, 2.0156, 3.2500])
    """
    return convolve(1, x, weight, bias, stride, padding, dilation, groups, points, stream, output_padding)


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    points: PointsLike = None,
    *,
    stream: Stream = 0,
) -> Tensor:
    """`torch.nn.functional.conv_transpose2d` with its operands and gradients rounded.

    Example:
        >>> import torch, qsim
        >>> x, w = torch.tensor([1.0, 3.3]).view(1, 1, 1, 2), torch.tensor([0.3, 1.0]).view(1, 1, 1, 2)
        >>> qsim.nn.functional.conv_transpose2d(x, w, points=qsim.FivePoint(act="e4m3", weight="e4m3")).flatten()
        tensor([0.3125, 2.0156, 3.2500])
    """
    return convolve(2, x, weight, bias, stride, padding, dilation, groups, points, stream, output_padding)


def conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    points: PointsLike = None,
    *,
    stream: Stream = 0,
) -> Tensor:
    """`torch.nn.functional.conv_transpose3d` with its operands and gradients rounded.

    Example:
        >>> import torch, qsim
        >>> x, w = torch.tensor([1.0, 3.3]).view(1, 1, 1, 1, 2), torch.tensor([0.3, 1.0]).view(1, 1, 1, 1, 2)
        >>> qsim.nn.functional.conv_transpose3d(x, w, points=qsim.FivePoint(act="e4m3", weight="e4m3")).flatten()
        tensor([0.3125, 2.0156, 3.2500])
    """
    return convolve(3, x, weight, bias, stride, padding, dilation, groups, points, stream, output_padding)


def convolve(
    dims: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
    points: PointsLike,
    stream: Stream,
    output_padding: Sizes | None = None,
) -> Tensor:
    """A convolution in one, two or three dimensions; a transposed one if it has an output padding."""
    transposed = output_padding is not None
    points = points_of(points)
    if points.is_identity:
        return _torch_conv(dims, x, weight, bias, stride, padding, dilation, groups, output_padding)
    refuse_tracing("layers with points", x, weight, has_points=True)
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    if weight.dim() != dims + 2 or x.dim() not in (dims + 1, dims + 2):
        raise ValueError(f"{name}: x of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}")
    if groups > 1 and points.is_scaled:
        check_groups(name, points, transposed)
    check_bias(name, bias, weight.shape[1] * groups if transposed else weight.shape[0])
    steps = _tuple(dilation, dims)
    if isinstance(padding, str):
        x, padding = _named_padding(name, x, padding, weight.shape[2:], steps, _tuple(stride, dims))
    numbers = _tuple(stride, dims), _tuple(padding, dims), steps, _tuple(output_padding or 0, dims), groups, transposed
    product = ConvolutionProduct(*numbers) if torch.compiler.is_compiling() else _known_product(*numbers)
    batched = x if x.dim() == dims + 2 else x.unsqueeze(0)
    plan = plan_for(points, product, batched, weight, bias)
    assert plan is not None  # there is something to round
    result = planned(batched, weight, bias, plan, stream)
    return result if x.dim() == dims + 2 else result.squeeze(0)


def _torch_conv(dims: int, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, output: Any) -> Tensor:
    if output is None:
        return (F.conv1d, F.conv2d, F.conv3d)[dims - 1](x, weight, bias, stride, padding, dilation, groups)
    transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    return transposed(x, weight, bias, stride, padding, output, groups, dilation)


def _tuple(sizes: Sizes, dims: int) -> tuple[int, ...]:
    """One number for each spatial dimension."""
    if isinstance(sizes, int):
        return (sizes,) * dims
    return tuple(sizes) * dims if len(sizes) == 1 else tuple(sizes)


def _named_padding(
    name: str, x: Tensor, padding: str, kernel: torch.Size, dilation: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """The input and the padding that a name gives; uneven padding is added to the input."""
    if padding == "valid":
        return x, (0,) * len(kernel)
    if padding != "same":
        raise ValueError(f"{name}: padding must be numbers, 'valid' or 'same', got {padding!r}")
    if any(step != 1 for step in stride):
        raise ValueError(f"{name}: padding='same' needs a stride of 1, got {stride}")
    total = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    uneven = [side for amount in reversed(total) for side in (0, amount % 2)]
    return (F.pad(x, uneven) if any(uneven) else x), tuple(amount // 2 for amount in total)
