"""Rounding as a function of a number: its neighbours in a format, the mean of the result, and its error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qsim.formats import Format
from qsim.functional import quantize
from qsim.rounding import DEFAULT_BITS, Rounding, Stochastic


class Expected(NamedTuple):
    """The results of rounding numbers; all float64.

    Attributes:
        below: The largest value that is not above the number; the smallest of all, where there is none.
        above: The smallest value that is not below the number; the largest of all, where there is none.
        mean: What the number becomes, on average if random bits are drawn.
        deviation: The distance between the number and what it becomes: its root mean square if random bits are drawn.
        farthest: The largest distance that there can be.
    """

    below: Tensor
    above: Tensor
    mean: Tensor
    deviation: Tensor
    farthest: Tensor


def expected(x: Tensor, fmt: Format, rounding: Rounding) -> Expected:
    """The expected results of rounding numbers; beyond the largest value, that value.

    Args:
        x: The numbers, float64.
        fmt: The format.
        rounding: The rounding.

    Example:
        >>> import torch
        >>> from qsim.formats import E2M1
        >>> from qsim.rounding import Stochastic
        >>> expected(torch.tensor([1.2], dtype=torch.float64), E2M1, Stochastic(bits=1)).mean  # two fifths of the way, and half a bit
        tensor([1.], dtype=torch.float64)
    """
    below, above = (quantize(x, fmt, rounding=way) for way in ("down", "up"))
    if not isinstance(rounding, Stochastic):
        result = quantize(x, fmt, rounding=rounding)
        distance = (result - x).abs()
        return Expected(below, above, result, distance, distance)
    chance = _chance_above(x, below, above, rounding)
    squares = chance * (above - x) ** 2 + (1 - chance) * (below - x) ** 2
    farthest = torch.maximum(torch.where(chance > 0, (above - x).abs(), 0.0), torch.where(chance < 1, (below - x).abs(), 0.0))
    return Expected(below, above, below + chance * (above - below), squares.sqrt(), farthest)


def _chance_above(x: Tensor, below: Tensor, above: Tensor, rounding: Stochastic) -> Tensor:
    """The probability of the upper neighbour; zero where both are the same."""
    count = 2.0 ** (rounding.bits or DEFAULT_BITS)
    gap = torch.where(above > below, above - below, 1.0)
    is_positive = x >= 0
    # Random bits are compared with the way from the neighbour nearer to zero.
    outward = torch.where(is_positive, x - below, above - x) / gap
    chance = (rounding.steps(outward) / count).clamp(0, 1)
    return torch.where(above > below, torch.where(is_positive, chance, 1 - chance), 0.0)


def corners(values: Sequence[float], low: float, high: float) -> Tensor:
    """Return points between which expected values are linear, float64: 64 in each gap between values, and the neighbours of each.

    Args:
        values: The values of a format between two limits, sorted.
        low: The lower limit.
        high: The upper limit.
    """
    ends = torch.tensor([low, *values, high], dtype=torch.float64, device="cpu")
    inner = ends[:-1, None] + ends.diff()[:, None] * torch.arange(64, dtype=torch.float64, device="cpu") / 64
    return _with_their_neighbours(torch.cat([inner.flatten(), ends[-1:]])).clamp(low, high)


def within_a_binade(fmt: Format) -> Tensor:
    """Return numbers from 1 to 2, float64, that include, almost exactly, the one that a format rounds worst in any of its binades."""
    coarse = torch.arange(1024, dtype=torch.float64, device="cpu") / 1024
    # The worst gaps are the lowest; in them the last random bits count too.
    fine = 2.0 ** -torch.arange(1, fmt.grid.mantissa + 34, dtype=torch.float64, device="cpu")
    x = 1 + torch.cat([coarse, fine, torch.ones(1, dtype=torch.float64, device="cpu")])
    x = torch.cat([_with_their_neighbours(x), x - 2.0**-30, x + 2.0**-30])
    found: Tensor = x[(x >= 1) & (x < 2)].unique()
    return found


def _with_their_neighbours(x: Tensor) -> Tensor:
    infinity = torch.tensor(math.inf, dtype=torch.float64, device="cpu")
    every: Tensor = torch.cat([x.nextafter(-infinity), x, x.nextafter(infinity)]).unique()
    return every
