"""Rounding a tensor, or this process's shard of one, with random bits keyed on the index in the whole."""

from __future__ import annotations

from torch import Tensor

from qsim.functional import quantize, quantize_
from qsim.functional.quantizer import Quantizer
from qsim.random import shards
from qsim.random.noise import Noise
from qsim.random.places import WHOLE, Place, narrowed, widened


def round_into(out: Tensor, x: Tensor, quantizer: Quantizer, seed: int | None, stream: int, like: Tensor | None = None) -> None:
    """Round this process's shard of a tensor. Call it under `torch.no_grad()`.

    Args:
        out: The tensor to write to: `x` itself, or a tensor with the same placements.
        x: A tensor, distributed or not.
        quantizer: How to round.
        seed: The seed, `None` if the rounding draws no random bits.
        stream: The seed's stream for the whole tensor.
        like: A tensor with the placements of `x`, if `x` itself is a plain shard.
    """
    if not quantizer.spelt.is_stochastic:
        _round(shards.local(out), shards.local(x), quantizer, None, 0, 0)
        return
    like = x if like is None else like
    place = shards.place_of(like) if shards.is_distributed(like) else WHOLE  # type: ignore[arg-type]
    out, x = shards.local(out), shards.local(x)
    if not x.numel():
        return
    if not place.row:
        _round(out, x, quantizer, seed, stream, place.offset)
    else:
        _round_columns(out, x, quantizer, seed, stream, place)


def _round_columns(out: Tensor, x: Tensor, quantizer: Quantizer, seed: int | None, stream: int, place: Place) -> None:
    """Round a shard that has a piece of every row."""
    rows, offset = widened(x, place)
    how, overflow = quantizer.rounding, quantizer.overflow or "format"
    rounded = quantize(rows, quantizer.format, rounding=how, overflow=overflow, seed=Noise(seed, stream, offset), dtype=out.dtype)
    out.copy_(narrowed(rounded, place).reshape(x.shape))


def _round(out: Tensor, x: Tensor, quantizer: Quantizer, seed: int | None, stream: int, offset: int) -> None:
    how, overflow = quantizer.rounding, quantizer.overflow or "format"
    if out is x:
        quantize_(x, quantizer.format, rounding=how, overflow=overflow, seed=Noise(seed, stream, offset))
    else:
        quantize(x, quantizer.format, rounding=how, overflow=overflow, seed=Noise(seed, stream, offset), out=out)
