"""Bitwise comparison of tensors: a NaN equals itself, and negative zero differs from zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import qsim

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(x: Tensor) -> Tensor:
    """A tensor's bits, as integers."""
    return x.detach().contiguous().view(_WORDS[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit; memory layouts may differ."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(raw(a), raw(b).to(a.device))


def first_difference(x: Tensor, a: Tensor, b: Tensor) -> str:
    """The first difference of results for `x`, as text; empty if they agree."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    where = (raw(a) != raw(b)).reshape(-1).nonzero().reshape(-1)
    if not len(where):
        return ""
    i = int(where[0])
    value, first, second = (t.reshape(-1)[i].item() for t in (x, a, b))
    bits = [hex(int(raw(t).reshape(-1)[i])) for t in (x, a, b)]
    return f"{len(where)} differ; at {i}, {value!r} became {first!r} and {second!r}: bits {bits[0]}, {bits[1]} and {bits[2]}"


def is_in(x: Tensor, fmt: Any, overflow: str = "nonfinite") -> bool:
    """Whether every element is a value of a format."""
    return torch.equal(x.detach(), qsim.quantize(x.detach(), fmt, overflow=overflow))
