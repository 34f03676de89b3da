"""A cache of keys and values that rounds what goes in; imported only if it is used, because it needs transformers."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from qsim.functional.quantizer import Point, Quantizer, short
from qsim.functional.whole_scales import rounded_under, scales_from, without_whole
from qsim.scaling import Given, PerAxis, PerBlock, PerRow, PerTensor


class KVCache(DynamicCache):  # type: ignore[misc]
    """A cache of transformers that keeps keys and values in low precision: a `past_key_values` for models, and for `generate`.

    Each token's key and value are rounded once, when they come in, which is after the rotary embedding; attention then reads what was
    rounded, those of the current tokens included. They are kept in the model's dtype. With multi-head latent attention,
    the latents are the keys and the rotated keys the values, as in servers.

    A scale belongs to a token and a head (`PerRow`, `PerBlock`), or follows from the tokens of the first call and is then kept: that of the
    whole tensor, of each head (`PerAxis(1)`), and NVFP4's scale of the whole tensor. So after the first call, results do not depend on the
    number of tokens in a call.

    Args:
        keys: The rounding of keys: a `Quantizer`, a format or a block format; `None` for none.
        values: The rounding of values; by default the same.
        config: The config of the model, as for `transformers.DynamicCache`: models with sliding windows need it.

    Raises:
        ValueError: If tokens would share scales that change with every call.

    Example:
        >>> import torch, qsim
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model, tokens = LlamaForCausalLM(LlamaConfig(**sizes)).eval(), torch.arange(9)[None]
        >>> cache = qsim.nn.KVCache(qsim.Quantizer("e4m3", scale="row"))
        >>> whole = model(tokens, past_key_values=cache).logits
        >>> cache
        KVCache(keys=e4m3 rows, values=e4m3 rows, 9 tokens)
        >>> cache = qsim.nn.KVCache(qsim.Quantizer("e4m3", scale="row"))
        >>> one_by_one = [model(token[None], past_key_values=cache).logits for token in tokens.T]
        >>> torch.allclose(torch.cat(one_by_one, 1), whole, atol=1e-5)
        True
    """

    def __init__(self, keys: Point, values: Point | Literal["same"] = "same", *, config: Any = None) -> None:
        super().__init__(config=config)
        self._points = {"keys": _point("keys", keys), "values": _point("values", keys if values == "same" else values)}
        self._scales: dict[tuple[str, int], Tensor] = {}

    def __repr__(self) -> str:
        """The roundings and the number of tokens."""
        points = [f"{name}={'None' if point is None else short(point)}" for name, point in self._points.items()]
        return f"KVCache({', '.join(points)}, {self.get_seq_length() if self.layers else 0} tokens)"

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Round new keys and values, and return all of the layer."""
        rounded = [self._rounded(name, x, layer_idx) for name, x in (("keys", key_states), ("values", value_states))]
        found: tuple[Tensor, Tensor] = super().update(*rounded, layer_idx, *args, **kwargs)
        return found

    def reset(self) -> None:
        """Forget all tokens, and the scales that followed from the first ones."""
        super().reset()
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):  # transformers before 5.18 keeps them as zeros
                layer.keys = layer.values = None
                layer.is_initialized = False
        self._scales.clear()

    def _rounded(self, name: str, x: Tensor, layer: int) -> Tensor:
        point = self._points[name]
        if point is None:
            return x
        kept, under = without_whole(point)
        if kept is None:
            return point(x)
        scale = self._scales.get((name, layer))
        if scale is None:
            of_slices = isinstance(kept, PerAxis)
            scale = scales_from(x.detach().abs().amax((0, 2, 3) if of_slices else (0, 1, 2, 3)).view(-1), point, kept).view(1, -1, 1, 1)
            if bool(scale.isfinite().all()) and x.count_nonzero():  # zeros say nothing about later tokens
                self._scales[name, layer] = scale
        return rounded_under(x, under, scale)


def _point(name: str, given: Point) -> Quantizer | None:
    """A point as a quantizer whose scales do not depend on the number of tokens in a call."""
    if given is None:
        return None
    point = given if isinstance(given, Quantizer) else Quantizer(given)
    scale = point.scale
    is_kept = isinstance(scale, PerTensor) or (isinstance(scale, PerAxis) and scale.axis in (1, -3) and scale.outer is None)
    is_of_tokens = isinstance(scale, (PerRow, PerBlock)) and scale.dim in (3, -1)
    if scale is not None and not is_kept and not is_of_tokens and not isinstance(scale, Given):
        raise ValueError(
            f"KVCache: {name}: tokens would share scales that change with every call: give 'tensor', PerAxis(1), PerRow(), PerBlock(size) "
            f"or Given(value), got scale={scale!r}"
        )
    if point.transform is not None and without_whole(point)[0] is not None:
        raise ValueError(f"KVCache: {name}: a transform needs scales of tokens, without one of the whole tensor, got scale={scale!r}")
    return point
