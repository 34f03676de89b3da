"""Rounding a tensor, or this process's share of one, with random bits by the index in the whole."""

from __future__ import annotations

from torch import Tensor

from qsim import shards
from qsim.functional import quantize, quantize_
from qsim.quantizer import Quantizer
from qsim.random import WHOLE, Place, narrowed, widened


def round_into(out: Tensor, x: Tensor, quantizer: Quantizer, seed: int | None, stream: int, like: Tensor | None = None) -> None:
    """Rounds what this process holds of a tensor. To be called under `torch.no_grad()`.

    Args:
        out: Where to write it; `x` itself, or a tensor placed as `x` is.
        x: A tensor, distributed or not.
        quantizer: How to round.
        seed: The seed, `None` if the rounding draws no random bits.
        stream: The seed's stream for the whole tensor.
        like: A tensor that is placed as `x` is, where `x` does not tell.
    """
    if not quantizer.rounding.is_stochastic:
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
    """Rounds a share that has a piece of every row."""
    rows, offset = widened(x, place)
    how, overflow = quantizer.rounding, quantizer.overflow
    rounded = quantize(rows, quantizer.format, rounding=how, overflow=overflow, seed=seed, stream=stream, offset=offset, dtype=out.dtype)
    out.copy_(narrowed(rounded, place).reshape(x.shape))


def _round(out: Tensor, x: Tensor, quantizer: Quantizer, seed: int | None, stream: int, offset: int) -> None:
    how, overflow = quantizer.rounding, quantizer.overflow
    if out is x:
        quantize_(x, quantizer.format, rounding=how, overflow=overflow, seed=seed, stream=stream, offset=offset)
    else:
        quantize(x, quantizer.format, rounding=how, overflow=overflow, seed=seed, stream=stream, offset=offset, out=out)
