"""torch.nn.MultiheadAttention with points: its projections and both of its products are rounded."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from qsim.functional.tracing import refuse_tracing
from qsim.nn import functional
from qsim.nn.modules import FivePointModule
from qsim.random import streams
from qsim.random.sources import varied
from qsim.recipes.five_point import FivePoint

# Streams of the weights, which may have the same values.
_IN = tuple(streams.stream("attention", name) for name in ("query", "key", "value"))
_OUT, _SCORES, _MIXED = (streams.stream("attention", name) for name in ("out", "scores", "mixed"))


class MultiheadAttention(FivePointModule, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with its projections and both products of attention rounded.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.MultiheadAttention(8, 2, batch_first=True, points=qsim.FivePoint(act="e4m3", weight="e4m3"))
        >>> x = torch.randn(1, 5, 8)
        >>> [y.shape for y in layer(x, x, x)]
        [torch.Size([1, 5, 8]), torch.Size([1, 5, 5])]
    """

    @classmethod
    def check_points(cls, points: FivePoint) -> None:
        """Raise an error for delayed scales: six products would share one history."""
        if points.is_delayed:
            raise ValueError("MultiheadAttention: delayed scales are for layers of one product: give it others, or exclude it")

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
        refuse_tracing("MultiheadAttention", query, has_points=True)
        if is_causal and attn_mask is None:
            raise ValueError("MultiheadAttention: is_causal is a hint and needs attn_mask")
        self._check_inputs(query, key, value)
        stream = self.stream_in_use(self.points)
        batched = query.dim() == 3
        q, k, v = (self._batch_first(x) for x in self._project(query, key, value))
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        k, v = self._extended(k, v)
        if is_causal and key_padding_mask is None and not need_weights:  # torch believes the hint there, also about added keys
            mask = _additive(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu_(1), q.dtype)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if need_weights:  # torch scales the queries themselves there, and in the other case their products
            scores = functional.matmul(q * math.sqrt(1.0 / self.head_dim), k.mT, self.points, stream=varied(stream, _SCORES))
        else:
            scores = functional.matmul(q, k.mT, self.points, stream=varied(stream, _SCORES)) / self.head_dim**0.5
        if mask is not None:
            scores = scores + nn.functional.pad(mask, (0, k.shape[-2] - mask.shape[-1]))
        # A query with all keys masked: torch gives NaN with need_weights, and zeros without.
        weights = scores.softmax(-1) if need_weights else torch.ops.aten._safe_softmax.default(scores, -1)
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        mixed = functional.matmul(weights, v, self.points, stream=varied(stream, _MIXED)).transpose(1, 2).flatten(2)
        result = functional.linear(mixed, self.out_proj.weight, self.out_proj.bias, self.points, stream=varied(stream, _OUT))
        if not batched:
            result, weights = result.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            result = result.transpose(0, 1)
        if not need_weights:
            return result, None
        return result, weights.mean(-3) if average_attn_weights else weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        batch = 0 if self.batch_first else 1
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            wrong = "must all have 3 dimensions, or 2 without a batch"
        elif key.shape[:-1] != value.shape[:-1] or (query.dim() == 3 and query.shape[batch] != key.shape[batch]):
            wrong = "do not fit in batch or length"
        else:
            return
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"MultiheadAttention: query, key and value {wrong}, got {shapes}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values; an input that serves as several of them is rounded once, as torch multiplies it once."""
        module: Any = self
        inputs, counts = [query, key, value], [1, 1, 1]
        if module.in_proj_weight is None:
            weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        else:
            if key is value:
                inputs, counts = ([query], [3]) if query is key else ([query, key], [1, 2])
            weights = module.in_proj_weight.split([count * self.embed_dim for count in counts])
        bias = module.in_proj_bias
        biases = [None] * len(counts) if bias is None else bias.split([count * self.embed_dim for count in counts])
        stream = self.stream_in_use(self.points)
        projected = [
            functional.linear(x, weight, own_bias, self.points, stream=varied(stream, own))
            for x, weight, own_bias, own in zip(inputs, weights, biases, _IN, strict=False)
        ]
        return [part for x in projected for part in x.split(self.embed_dim, -1)]

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """The term added to the scores, if any: minus infinity at masked positions."""
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        total = None
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, (queries, keys), (batch * self.num_heads, queries, keys))
            shaped = attn_mask.unflatten(0, (-1, self.num_heads)) if attn_mask.dim() == 3 else attn_mask
            total = _additive(shaped, q.dtype)
        if key_padding_mask is not None:
            if key_padding_mask.dim() == 1:
                key_padding_mask = key_padding_mask.unsqueeze(0)
            _check_mask("key_padding_mask", key_padding_mask, (batch, keys))
            padding = _additive(key_padding_mask[:, None, None, :], q.dtype)
            total = padding if total is None else total + padding
        return total

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with those that torch adds to them, which no mask hides."""
        batch, _, width = k.shape
        added: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            added.append((self.bias_k, self.bias_v))
        if self.add_zero_attn:
            added.append((k.new_zeros(1, 1, width), v.new_zeros(1, 1, width)))
        for key, value in added:
            k = torch.cat([k, key.to(k.dtype).expand(batch, 1, width)], 1)
            v = torch.cat([v, value.to(v.dtype).expand(batch, 1, width)], 1)
        return k, v


def _check_mask(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if mask.shape not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"MultiheadAttention: {name} must have shape {allowed}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"MultiheadAttention: {name} must be boolean or floating, got {mask.dtype}")


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
