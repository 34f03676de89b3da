"""torch.nn.functional's linear, convolutions, matmul, embedding and attention, rounded at five points."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.formats.base import check_flag, check_flags
from qsim.nn.convolutions import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from qsim.nn.product import bilinear
from qsim.nn.product.autograd import planned
from qsim.nn.product.checks import check_bias, check_lookup
from qsim.nn.product.embedding import Lookup
from qsim.nn.product.plans import plan_for
from qsim.private import safe_softmax
from qsim.random.sources import Stream
from qsim.recipes.points_of import PointsLike, points_of

__all__ = [
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "embedding",
    "linear",
    "matmul",
    "scaled_dot_product_attention",
]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, points: PointsLike = None, *, stream: Stream = 0) -> Tensor:
    """`torch.nn.functional.linear` with its operands and gradients rounded.

    Args:
        x: Input of shape (…, in_features).
        weight: Of shape (out_features, in_features).
        bias: Of shape (out_features,); it is not rounded, and its gradient sums the unrounded gradient of the output.
        points: Where to round, nowhere by default: a `FivePoint`, a recipe, a format or `Quantizer` for all points, or a name of these.
        stream: Distinguishes layers with the same weights, or that are seeded alike, where anything is rounded stochastically.

    Example:
        >>> import torch, qsim
        >>> x, w = torch.tensor([[1.0, 2.0, 3.3]]), torch.tensor([[0.3, 1.0, 1.0]])
        >>> qsim.nn.functional.linear(x, w, points=qsim.FivePoint(act="e4m3", weight="e4m3"))
        tensor([[5.5625]])
    """
    plan = plan_for(points, bilinear.LINEAR, x, weight, bias)
    if plan is None:
        return F.linear(x, weight, bias)
    if x.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"linear: x of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        check_bias("linear", bias, weight.shape[0])
    return planned(x, weight, bias, plan, stream)


def matmul(a: Tensor, b: Tensor, points: PointsLike = None, *, stream: Stream = 0) -> Tensor:
    """`torch.matmul` of two inputs: both are rounded at `act` in the forward pass and at `act_bwd` in the backward pass.

    Layers that are seeded alike draw independent noise if each gives a `stream` of its own.

    Example:
        >>> import torch, qsim
        >>> a = torch.tensor([[1.1, 0.0], [0.0, 2.3]])
        >>> qsim.nn.functional.matmul(a, torch.eye(2), points=qsim.FivePoint(act="e2m1"))
        tensor([[1., 0.],
                [0., 2.]])
    """
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(1) if b.dim() == 1 else b
    plan = plan_for(points, bilinear.MATMUL, left, right, two_inputs=True)
    if plan is None:
        return torch.matmul(a, b)
    if not a.dim() or not b.dim() or a.shape[-1] != b.shape[-2 if b.dim() > 1 else 0]:
        raise ValueError(f"matmul: shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit")
    result = planned(left, right, None, plan, stream)
    result = result.squeeze(-2) if a.dim() == 1 else result
    return result.squeeze(-1) if b.dim() == 1 else result


def bmm(a: Tensor, b: Tensor, points: PointsLike = None) -> Tensor:
    """`torch.bmm` of two inputs; see `matmul`.

    Example:
        >>> import torch, qsim
        >>> a, b = torch.tensor([[[1.0, 3.3]]]), torch.tensor([[[0.3], [1.0]]])
        >>> qsim.nn.functional.bmm(a, b, qsim.FivePoint(act="e4m3", weight="e4m3"))
        tensor([[[3.5625]]])
    """
    if a.dim() != 3 or b.dim() != 3:
        raise ValueError(f"bmm: both must be batches of matrices, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: batches of {a.shape[0]} and {b.shape[0]} matrices do not fit")
    return matmul(a, b, points)


def embedding(
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    points: PointsLike = None,
    *,
    scale_grad_by_freq: bool = False,
    stream: Stream = 0,
) -> Tensor:
    """`torch.nn.functional.embedding` with the weight rounded forward and the gradient rounded backward.

    With an accumulator, the third if there are three, the gradient of a row is a sum over its occurrences, in the order of their positions.

    Example:
        >>> import torch, qsim
        >>> qsim.nn.functional.embedding(torch.tensor([1]), torch.tensor([[0.1], [1.1]]), points=qsim.FivePoint(weight="e2m1"))
        tensor([[1.]])
    """
    check_flag("embedding", "scale_grad_by_freq", scale_grad_by_freq)
    points = points_of(points)
    if points.is_identity:
        return F.embedding(x, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    if points.is_scaled:
        check_lookup(points)
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx must be in {-rows}…{rows - 1}, got {padding_idx}")
    if scale_grad_by_freq and points.sums[2] is not None:
        raise ValueError("embedding: scale_grad_by_freq cannot be combined with an accumulator")
    padding = -1 if padding_idx is None else padding_idx % rows
    plan = plan_for(points, Lookup(padding, scale_grad_by_freq), x, weight)
    assert plan is not None  # there is something to round
    return planned(x, weight, None, plan, stream)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    points: PointsLike = None,
    *,
    stream: Stream = 0,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with both of its products rounded; the softmax is not.

    Example:
        >>> import torch, qsim
        >>> q = torch.ones(1, 2, 4)
        >>> qsim.nn.functional.scaled_dot_product_attention(q, q, q, points=qsim.FivePoint(act="e4m3")).shape
        torch.Size([1, 2, 4])
    """
    check_flags("scaled_dot_product_attention", is_causal=is_causal, enable_gqa=enable_gqa)
    points = points_of(points)
    if points.is_identity:
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
    scores = matmul(query, key.mT, points, stream=stream) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    # As in torch, a query with all keys masked gets zeros.
    weights = F.dropout(safe_softmax(scores, -1), dropout_p)
    return matmul(weights, value, points, stream=stream)
