"""torch.nn.functional's linear, convolutions, matmul, embedding and attention, rounded at five points."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from qsim.five_point import FivePoint
from qsim.formats.dtypes import FLOATS
from qsim.nn import products
from qsim.nn.five_point_embedding import five_point_embedding
from qsim.nn.five_point_product import autocasts, five_point_product
from qsim.nn.operands import Setting

Sizes = int | tuple[int, ...]


def _rounds(points: FivePoint | None) -> TypeGuard[FivePoint]:
    """Whether there is anything to round; what is no `FivePoint` is refused, and what autograd functions are not made for."""
    if points is not None and not isinstance(points, FivePoint):
        raise TypeError(f"points must be a FivePoint or None, got {points!r}")
    if points is None or points.is_identity:
        return False
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError("points do not round under torch.func's transforms (grad, vmap, jvp and the like): use torch.autograd")
    return True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, points: FivePoint | None = None, *, stream: int = 0) -> Tensor:
    """`torch.nn.functional.linear` with its operands and gradients rounded.

    Args:
        x: The input, of shape (…, in_features).
        weight: Of shape (out_features, in_features).
        bias: Of shape (out_features,); it is not rounded, and its gradient sums the unrounded gradient of the output.
        points: Where to round; nowhere by default.
        stream: Tells weights apart that hold the same numbers, where weights are rounded stochastically.

    Example:
        >>> import torch, qsim
        >>> x, w = torch.tensor([[1.0, 2.0, 3.3]]), torch.tensor([[0.3, 1.0, 1.0]])
        >>> qsim.nn.functional.linear(x, w, points=qsim.FivePoint(act="e4m3", weight="e4m3"))
        tensor([[5.5625]])
    """
    if not _rounds(points):
        return F.linear(x, weight, bias)
    x, weight, bias, dtype = _operands(x, weight, bias, points)
    if x.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"linear: x of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}")
    _check_bias("linear", bias, weight.shape[0])
    return _product(x, weight, bias, Setting(points, products.Linear(), dtype=dtype), stream)


def matmul(a: Tensor, b: Tensor, points: FivePoint | None = None) -> Tensor:
    """`torch.matmul` of two inputs: both are rounded as inputs are, at `act` forward and at `act_bwd` backward.

    Example:
        >>> import torch, qsim
        >>> a = torch.tensor([[1.1, 0.0], [0.0, 2.3]])
        >>> qsim.nn.functional.matmul(a, torch.eye(2), points=qsim.FivePoint(act="e2m1"))
        tensor([[1., 0.],
                [0., 2.]])
    """
    if not _rounds(points):
        return torch.matmul(a, b)
    a, b, _, dtype = _operands(a, b, None, points, two_inputs=True)
    if not a.dim() or not b.dim() or a.shape[-1] != b.shape[-2 if b.dim() > 1 else 0]:
        raise ValueError(f"matmul: shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit")
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(1) if b.dim() == 1 else b
    result = _product(left, right, None, Setting(points, products.Matmul(), two_inputs=True, dtype=dtype))
    result = result.squeeze(-2) if a.dim() == 1 else result
    return result.squeeze(-1) if b.dim() == 1 else result


def bmm(a: Tensor, b: Tensor, points: FivePoint | None = None) -> Tensor:
    """`torch.bmm` of two inputs; see `matmul`."""
    if a.dim() != 3 or b.dim() != 3:
        raise ValueError(f"bmm: both must be batches of matrices, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: batches of {a.shape[0]} and {b.shape[0]} matrices do not fit")
    return matmul(a, b, points)


def embedding(
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    points: FivePoint | None = None,
    *,
    scale_grad_by_freq: bool = False,
    stream: int = 0,
) -> Tensor:
    """`torch.nn.functional.embedding` with the weight rounded forward and the gradient rounded backward.

    Example:
        >>> import torch, qsim
        >>> qsim.nn.functional.embedding(torch.tensor([1]), torch.tensor([[0.1], [1.1]]), points=qsim.FivePoint(weight="e2m1"))
        tensor([[1.]])
    """
    if not _rounds(points):
        return F.embedding(x, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx must lie in {-rows}…{rows - 1}, got {padding_idx}")
    padding = -1 if padding_idx is None else padding_idx % rows
    if _is_distributed(x, weight):
        from qsim.nn.sharded_embedding import sharded_embedding

        return sharded_embedding(x, weight, padding, scale_grad_by_freq, points, stream)
    return five_point_embedding(x, weight, padding, scale_grad_by_freq, points, stream)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    points: FivePoint | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with both of its products rounded; the softmax is not.

    Example:
        >>> import torch, qsim
        >>> q = torch.ones(1, 2, 4)
        >>> qsim.nn.functional.scaled_dot_product_attention(q, q, q, points=qsim.FivePoint(act="e4m3")).shape
        torch.Size([1, 2, 4])
    """
    if not _rounds(points):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention: give attn_mask or is_causal, not both")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise ValueError(f"scaled_dot_product_attention: attn_mask must be bool or floating as the query is, got {attn_mask.dtype}")
    if enable_gqa:
        if query.shape[-3] % key.shape[-3] or query.shape[-3] % value.shape[-3]:
            heads = f"{query.shape[-3]}, got {key.shape[-3]} and {value.shape[-3]}"
            raise ValueError(f"scaled_dot_product_attention: the heads of key and value must divide the query's {heads}")
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = matmul(query, key.mT, points) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    # As torch's own does it, a query that may look at nothing gets zeros.
    weights = F.dropout(torch.ops.aten._safe_softmax.default(scores, -1), dropout_p)
    return matmul(weights, value, points)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    points: FivePoint | None = None,
    *,
    stream: int = 0,
) -> Tensor:
    """`torch.nn.functional.conv1d` with its operands and gradients rounded.

    Example:
        >>> import torch, qsim
        >>> qsim.nn.functional.conv1d(torch.full((1, 1, 3), 1.1), torch.ones(1, 1, 2), points=qsim.FivePoint(act="e2m1"))
        tensor([[[2., 2.]]])
    """
    return _conv(1, x, weight, bias, stride, padding, dilation, groups, points, stream)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    points: FivePoint | None = None,
    *,
    stream: int = 0,
) -> Tensor:
    """`torch.nn.functional.conv2d` with its operands and gradients rounded."""
    return _conv(2, x, weight, bias, stride, padding, dilation, groups, points, stream)


def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    points: FivePoint | None = None,
    *,
    stream: int = 0,
) -> Tensor:
    """`torch.nn.functional.conv3d` with its operands and gradients rounded."""
    return _conv(3, x, weight, bias, stride, padding, dilation, groups, points, stream)


def conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    points: FivePoint | None = None,
    *,
    stream: int = 0,
) -> Tensor:
    """`torch.nn.functional.conv_transpose1d` with its operands and gradients rounded."""
    return _conv(1, x, weight, bias, stride, padding, dilation, groups, points, stream, output_padding)


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    points: FivePoint | None = None,
    *,
    stream: int = 0,
) -> Tensor:
    """`torch.nn.functional.conv_transpose2d` with its operands and gradients rounded."""
    return _conv(2, x, weight, bias, stride, padding, dilation, groups, points, stream, output_padding)


def conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    points: FivePoint | None = None,
    *,
    stream: int = 0,
) -> Tensor:
    """`torch.nn.functional.conv_transpose3d` with its operands and gradients rounded."""
    return _conv(3, x, weight, bias, stride, padding, dilation, groups, points, stream, output_padding)


def _product(a: Tensor, w: Tensor, bias: Tensor | None, setting: Setting, stream: int = 0) -> Tensor:
    """The product of whole tensors, or of distributed ones."""
    if _is_distributed(a, w, bias):
        from qsim.nn.sharded import sharded_product

        return sharded_product(a, w, bias, setting, stream)
    return five_point_product(a, w, bias, setting, stream)


def _check_bias(name: str, bias: Tensor | None, features: int) -> None:
    """Refuses a bias that is not one number for each feature; one that is broadcast would get the gradient of another."""
    if bias is not None and bias.shape != (features,):
        raise ValueError(f"{name}: bias must have shape {(features,)}, got {tuple(bias.shape)}")


def _is_distributed(*operands: Tensor | None) -> bool:
    """Whether one of the operands is a distributed tensor, which there are only in a process that is one of several."""
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor  # brings much of torch.distributed along

    return any(isinstance(x, DTensor) for x in operands)


def _conv(
    dims: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
    points: FivePoint | None,
    stream: int,
    output_padding: Sizes | None = None,
) -> Tensor:
    transposed = output_padding is not None
    if not _rounds(points):
        return _torch_conv(dims, x, weight, bias, stride, padding, dilation, groups, output_padding)
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    if weight.dim() != dims + 2 or x.dim() not in (dims + 1, dims + 2):
        raise ValueError(f"{name}: x of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}")
    _check_bias(name, bias, weight.shape[1] * groups if transposed else weight.shape[0])
    x, weight, bias, dtype = _operands(x, weight, bias, points)
    steps = _tuple(dilation, dims)
    if isinstance(padding, str):
        x, padding = _named_padding(name, x, padding, weight.shape[2:], steps, _tuple(stride, dims))
    product = products.Convolution(
        _tuple(stride, dims), _tuple(padding, dims), steps, _tuple(output_padding or 0, dims), groups, transposed
    )
    batched = x if x.dim() == dims + 2 else x.unsqueeze(0)
    result = _product(batched, weight, bias, Setting(points, product, dtype=dtype), stream)
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
    """The input and its padding where that is given by name; what is uneven is added to the input."""
    if padding == "valid":
        return x, (0,) * len(kernel)
    if padding != "same":
        raise ValueError(f"{name}: padding must be numbers, 'valid' or 'same', got {padding!r}")
    if any(step != 1 for step in stride):
        raise ValueError(f"{name}: padding='same' needs a stride of 1, got {stride}")
    total = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    uneven = [side for amount in reversed(total) for side in (0, amount % 2)]
    return (F.pad(x, uneven) if any(uneven) else x), tuple(amount // 2 for amount in total)


def _operands(
    a: Tensor, b: Tensor, bias: Tensor | None, points: FivePoint, two_inputs: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype | None]:
    """The arguments of a product, checked, and the dtype of its result under autocast.

    Autocast makes 16 bits of what no point rounds forward. What one does is rounded as it is, once.
    """
    for operand in (a, b):
        if operand.layout != torch.strided:
            raise TypeError(f"points round dense tensors alone, got an operand of layout {operand.layout}")
        if operand.dtype not in FLOATS:
            raise TypeError(f"points round float32, bfloat16, float16 and float64 alone, got an operand of {operand.dtype}")
    devices = [x.device for x in (a, b, bias) if x is not None]
    if any(device != devices[0] for device in devices):
        raise ValueError(f"the operands of a product must be on one device, got {', '.join(map(str, devices))}")
    if not autocasts(a.device):
        return a, b, bias, None
    lower = torch.get_autocast_dtype(a.device.type)
    of_a, of_b = (torch.float64 if x.dtype == torch.float64 else lower for x in (a, b))
    a = a.to(of_a) if points.act is None else a
    b = b.to(of_b) if (points.act if two_inputs else points.weight) is None else b
    bias = bias.to(lower) if bias is not None and bias.dtype != torch.float64 else bias
    return a, b, bias, torch.promote_types(of_a, of_b)
