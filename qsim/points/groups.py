"""Groups of elements that share parameters, in the terms of `qsim.scaling`."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from qsim.scaling import PerAxis, PerBlock, PerRow, PerTensor, PerTile, Scaling, resolve


def check_granularity(owner: str, granularity: object) -> Scaling:
    """Raise an error unless a value is a scaling, or the text of one, that only describes groups of elements; return it."""
    if isinstance(granularity, str):
        granularity = resolve(granularity)
    if not isinstance(granularity, (PerTensor, PerRow, PerAxis, PerBlock, PerTile)):
        raise TypeError(
            f"{owner}: granularity must be PerTensor, PerRow, PerAxis, PerBlock or PerTile of qsim.scaling, got {granularity!r}"
        )
    plain = PerTensor()
    for name in ("format", "rule", "margin", "outer"):
        if getattr(granularity, name) != getattr(plain, name):
            raise ValueError(f"{owner}: granularity only describes which elements form a group; leave {name} out of {granularity!r}")
    return granularity


def grouped(x: Tensor, granularity: Scaling) -> Tensor:
    """A tensor by groups: its dimensions are the number of groups and the extent of a group, in turn. Groups at the edges end in zeros."""
    extent, counts = granularity.extent(x.shape), granularity.counts(x.shape)
    missing = [count * size - length for count, size, length in zip(counts, extent, x.shape, strict=True)]
    if any(missing):
        x = pad(x, [amount for length in reversed(missing) for amount in (0, length)])
    return x.reshape([length for pair in zip(counts, extent, strict=True) for length in pair])


def ungrouped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo `grouped` for a tensor of a shape."""
    lengths = [x.shape[i] * x.shape[i + 1] for i in range(0, x.dim(), 2)]
    return x.reshape(lengths)[tuple(slice(length) for length in shape)]


def within(x: Tensor) -> tuple[int, ...]:
    """The dimensions within groups of a grouped tensor."""
    return tuple(range(1, x.dim(), 2))
