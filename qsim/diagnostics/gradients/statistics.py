"""Bias and variance of gradients from repeated draws: unbiased estimators, with intervals by leaving out one batch at a time.

Batch `i` of `n` has a gradient `g_i` in full precision and, drawn `m` times, gradients `h_ij` under rounding, whose mean over draws is
`h_i`. Batches are independent, draws are independent given the batch, and all norms are Euclidean: every number is a sum over elements.

- rounding, `T^Q`: `E |h_ij - E[h_ij | i]|²`, as the mean over batches of the variance between draws, divided by `m - 1`;
- sampling, `T^s`: the variance between batches of `E[h_ij | i]`. The means `h_i` vary by `T^Q / m` more, which is subtracted;
- bias: `|E[h_ij - g_i]|²`. With `d_i = h_i - g_i` it is the mean of the products `<d_i, d_k>` of two *different* batches, which are
  independent; `|mean d|²` would be too large by the variance of the mean.

Estimates that are differences can be negative if the true value is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A measured number with its confidence interval.

    Attributes:
        value: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Example:
        >>> from qsim.diagnostics import Estimate
        >>> print(Estimate(value=1.5, low=1.25, high=1.75))
        1.5 [1.25, 1.75]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """The number and, in brackets, its interval."""
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


class Moments(NamedTuple):
    """Statistics of the gradients of one or more weights: numbers for each batch, which add up over weights.

    Attributes:
        spread: The variance between a batch's draws.
        apart: The squared distance of the batch's mean gradient from that of all batches.
        off: The squared distance `|d_i|²` from the gradient in full precision.
        along: `<d_i, d_1 + … + d_n>`.
    """

    spread: Tensor
    apart: Tensor
    off: Tensor
    along: Tensor

    def row(self, k: int) -> Moments:
        """Those of one layer, where rows are layers."""
        return Moments(*(column[k] for column in self))


def weight_moments(means: Tensor, spread: Tensor, reference: Tensor) -> Moments:
    """The moments of one weight.

    Args:
        means: The mean gradient of each batch, as rows.
        spread: The variance between each batch's draws, summed over elements.
        reference: The rows in full precision.
    """
    wide = means.double()
    off = wide - reference.double()
    apart = (wide - wide.mean(0)).square().sum(1)
    return Moments(spread.double(), apart, off.square().sum(1), off @ off.sum(0))


def total_moments(parts: Sequence[Moments]) -> Moments:
    """The moments of several weights together."""
    return Moments(*(torch.stack(column).sum(0) for column in zip(*parts, strict=True)))


class Jackknife(NamedTuple):
    """An estimate from all batches, and from all but each one.

    Their spread shows how uncertain the estimate is. By Efron and Stein's inequality the reported variance is, on average, not
    too small for any of the estimates here; the quantile is Student's, because batches are few.
    """

    value: Tensor
    without: Tensor

    def plus(self, other: Jackknife) -> Jackknife:
        """The estimate of a sum of two numbers."""
        return Jackknife(self.value + other.value, self.without + other.without)

    def over(self, other: Jackknife) -> Jackknife:
        """The estimate of the ratio of two numbers."""
        return Jackknife(self.value / other.value, self.without / other.without)

    def estimate(self, level: float) -> Estimate:
        """The number and its interval, which is symmetric."""
        value, reach = float(self.value), self._reach(level)
        return Estimate(value, value - reach, value + reach)

    def ratio_estimate(self, level: float) -> Estimate:
        """The same for a ratio of positive numbers, whose interval is symmetric on a logarithmic scale."""
        value, reach = float(self.value), torch.tensor(Jackknife(self.value.log(), self.without.log())._reach(level)).exp().item()
        return Estimate(value, value / reach, value * reach)

    def _reach(self, level: float) -> float:
        count = len(self.without)
        variance = (self.without - self.without.mean()).square().sum() * (count - 1) / count
        return student(level, count - 1) * math.sqrt(variance)


def rounding_variance(found: Moments) -> Jackknife:
    """`T^Q`: the variance that rounding adds to the gradient of a batch."""
    total, count = found.spread.sum(), len(found.spread)
    return Jackknife(total / count, (total - found.spread) / (count - 1))


def sampling(found: Moments, draws: int) -> Jackknife:
    """`T^s`: the variance between batches, without what rounding adds to their means over draws."""
    total, count = found.apart.sum(), len(found.apart)
    # Without one point of n, the squared distances from the mean decrease by n / (n - 1) times that point's own.
    between = Jackknife(total / (count - 1), (total - found.apart * count / (count - 1)) / (count - 2))
    noise = rounding_variance(found)
    return Jackknife(between.value - noise.value / draws, between.without - noise.without / draws)


def squared_bias(found: Moments) -> Jackknife:
    """The squared norm of the mean distance from full precision."""
    count, along, off = len(found.off), found.along, found.off
    products = (along - off).sum()
    return Jackknife(products / (count * (count - 1)), (products - 2 * (along - off)) / ((count - 1) * (count - 2)))


@lru_cache(maxsize=64)
def student(level: float, degrees: int) -> float:
    """The magnitude that Student's t stays below with a probability.

    Example:
        >>> round(student(0.95, 10), 3), round(student(0.95, 1), 3)
        (2.228, 12.706)
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """The probability that |t| is below `sqrt(degrees) * tan(angle)`: a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), degrees % 2
    term, total = cosine if odd else 1.0, 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
