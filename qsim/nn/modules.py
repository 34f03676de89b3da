"""torch.nn's layers with points: each a subclass of the module it stands for, and told from it by `points` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qsim import random
from qsim.five_point import FivePoint
from qsim.nn import functional


class FivePointModule(nn.Module):
    """What every layer with points has.

    Attributes:
        points: Where the layer rounds.
        stream: Tells its weight's random bits from those of other weights that hold the same numbers.
    """

    points: FivePoint
    stream: int

    def __init__(self, *args: Any, points: FivePoint | Mapping[str, Any] | None = None, stream: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.points = resolve_points(points)
        self.stream = stream

    def extra_repr(self) -> str:
        """The layer's numbers and its points."""
        return ", ".join(part for part in (super().extra_repr(), f"points=({self.points})") if part)


def resolve_points(points: object) -> FivePoint:
    """Makes a `FivePoint` of what names one."""
    if points is None:
        return FivePoint()
    if isinstance(points, FivePoint):
        return points
    if isinstance(points, Mapping):
        return FivePoint.from_dict(points)
    raise TypeError(f"points must be a FivePoint, a dictionary of its points or None, got {points!r}")


class Linear(FivePointModule, nn.Linear):
    """`torch.nn.Linear` rounded at five points.

    Example:
        >>> import torch, qsim
        >>> qsim.nn.Linear(4, 2, points=qsim.FivePoint(act="e4m3", grad="e5m2"))
        Linear(in_features=4, out_features=2, bias=True, points=(act=e4m3, grad=e5m2))
    """

    def forward(self, input: Tensor) -> Tensor:
        """The rounded product."""
        return functional.linear(input, self.weight, self.bias, self.points, stream=self.stream)


class _Convolution(FivePointModule):
    """What convolutions share: `_conv_forward` is where torch's own compute, behind every kind of padding."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        module: Any = self
        padding = module.padding
        padded = input
        if module.padding_mode != "zeros":
            padded = nn.functional.pad(input, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            padding = 0
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.dim() - 3]
        numbers = (module.stride, padding, module.dilation, module.groups)
        return convolve(padded, weight, bias, *numbers, self.points, stream=self.stream)


class Conv1d(_Convolution, nn.Conv1d):
    """`torch.nn.Conv1d` rounded at five points."""


class Conv2d(_Convolution, nn.Conv2d):
    """`torch.nn.Conv2d` rounded at five points.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.Conv2d(1, 2, 3, points=qsim.FivePoint(weight="e4m3"))
        >>> layer(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 2, 6, 6])
    """


class Conv3d(_Convolution, nn.Conv3d):
    """`torch.nn.Conv3d` rounded at five points."""


class _TransposedConvolution(FivePointModule):
    """What transposed convolutions share."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The rounded transposed convolution."""
        module: Any = self
        if module.padding_mode != "zeros":
            raise ValueError(f"transposed convolutions pad with zeros alone, got padding_mode={module.padding_mode!r}")
        dims = module.weight.dim() - 2
        output_padding = module._output_padding(
            input, output_size, module.stride, module.padding, module.kernel_size, dims, module.dilation
        )
        convolve = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[dims - 1]
        numbers = (module.stride, module.padding, output_padding, module.groups, module.dilation)
        return convolve(input, module.weight, module.bias, *numbers, self.points, stream=self.stream)


class ConvTranspose1d(_TransposedConvolution, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` rounded at five points."""


class ConvTranspose2d(_TransposedConvolution, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` rounded at five points."""


class ConvTranspose3d(_TransposedConvolution, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` rounded at five points."""


class Embedding(FivePointModule, nn.Embedding):
    """`torch.nn.Embedding` with its table rounded forward and its gradient backward."""

    def forward(self, input: Tensor) -> Tensor:
        """The rounded rows."""
        if self.points.is_identity:
            return super().forward(input)
        if self.max_norm is not None or self.sparse:
            raise ValueError("Embedding: max_norm and sparse=True cannot be combined with points")
        return functional.embedding(
            input, self.weight, self.padding_idx, self.points, scale_grad_by_freq=self.scale_grad_by_freq, stream=self.stream
        )


class MultiheadAttention(FivePointModule, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with its projections and both products of attention rounded."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The rounded attention; arguments and results are torch's."""
        if self.points.is_identity:
            masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(query, key, value, *masks)
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError("MultiheadAttention: add_bias_kv and add_zero_attn cannot be combined with points")
        if is_causal and attn_mask is None:
            raise ValueError("MultiheadAttention: is_causal is a hint and needs attn_mask")
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (self._heads(x) for x in self._project(query, key, value))
        scores = functional.matmul(q, k.mT, self.points) / self.head_dim**0.5
        scores = scores + self._mask(attn_mask, key_padding_mask, scores)
        # A query that may look at nothing: torch's own gives NaN with the weights, and zeros without.
        weights = scores.softmax(-1) if need_weights else torch._safe_softmax(scores, -1)
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        mixed = functional.matmul(weights, v, self.points).transpose(1, 2).flatten(2)
        result = functional.linear(mixed, self.out_proj.weight, self.out_proj.bias, self.points, stream=self.stream ^ _OUT)
        if not batched:
            result, weights = result.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            result = result.transpose(0, 1)
        if not need_weights:
            return result, None
        return result, weights.mean(-3) if average_attn_weights else weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ValueError(f"MultiheadAttention: query, key and value must all have 3 dimensions, or 2 without a batch, got {shapes}")
        batch = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (query.dim() == 3 and query.shape[batch] != key.shape[batch]):
            raise ValueError(f"MultiheadAttention: the batches or lengths of query, key and value do not fit, got {shapes}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """The three inputs of attention, each by its own weight."""
        module: Any = self
        if module.in_proj_weight is None:
            parts = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        else:
            parts = module.in_proj_weight.chunk(3)
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        return [
            functional.linear(x, weight, bias, self.points, stream=self.stream ^ own)
            for x, weight, bias, own in zip((query, key, value), parts, biases, _IN, strict=True)
        ]

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim))
        return heads.transpose(1, 2)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, scores: Tensor) -> Tensor:
        """What is added to the scores: minus infinity where a mask says so."""
        total = torch.zeros((), dtype=scores.dtype, device=scores.device)
        batch, heads, queries, keys = scores.shape
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, (queries, keys), (batch * heads, queries, keys))
            shaped = attn_mask.unflatten(0, (-1, self.num_heads)) if attn_mask.dim() == 3 else attn_mask
            total = total + _additive(shaped, scores)
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, (batch, keys))
            total = total + _additive(key_padding_mask[:, None, None, :], scores)
        return total


# Streams of the four weights, which may hold the same numbers.
_IN = tuple(random.stream("attention", name) for name in ("query", "key", "value"))
_OUT = random.stream("attention", "out")


def _check_mask(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if mask.shape not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"MultiheadAttention: {name} must have shape {allowed}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"MultiheadAttention: {name} must be boolean or floating, got {mask.dtype}")


def _additive(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device).masked_fill_(mask, float("-inf"))
