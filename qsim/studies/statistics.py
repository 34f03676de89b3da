"""Means and slopes over several seeds, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate, and the bounds of its 95 % confidence interval.

    Example:
        >>> print(Interval(0.8124, 0.8012, 0.8231))
        0.8124 [0.8012, 0.8231]
        >>> print(f"{Interval(0.8124, 0.8012, 0.8231):.1%}")
        81.2% [80.1%, 82.3%]
    """

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return " ".join((format(self.value, spec or ".4g"), f"[{format(self.low, spec or '.4g')}, {format(self.high, spec or '.4g')}]"))

    def __str__(self) -> str:
        return format(self, "")

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high


def mean(values: Sequence[float]) -> Interval:
    """The mean with Student's interval; with one value, the interval contains all numbers.

    Example:
        >>> print(mean([1.0, 2.0, 3.0]))
        2 [-0.4841, 4.484]
    """
    count, center = len(values), float(np.mean(values))
    if count < 2:
        return Interval(center, -math.inf, math.inf)
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return Interval(center, center - half, center + half)


def difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The mean of `first` minus that of `second`, seed by seed: both begin with the same weights and see the same batches."""
    return mean([a - b for a, b in zip(first, second, strict=True)])


def exponential(interval: Interval, most: float = math.inf) -> Interval:
    """The exponential of an estimate in logarithms, limited to `most`.

    Example:
        >>> print(exponential(Interval(0.0, -1.0, 1.0)))
        1 [0.3679, 2.718]
    """
    value, low, high = (min(math.inf if bound >= 700 else math.exp(bound), most) for bound in (interval.value, interval.low, interval.high))
    return Interval(value, low, high)


def slope(x: Sequence[float], y: Sequence[float]) -> Interval:
    """The slope of a straight line through log y against log x, with Student's interval of least squares.

    Example:
        >>> print(f"{slope([1, 2, 4, 8], [8.0, 4.1, 1.9, 1.0]):.2f}")
        -1.01 [-1.11, -0.91]
    """
    found = stats.linregress(np.log(x), np.log(y))
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(x) - 2) * found.stderr)
    return Interval(float(found.slope), float(found.slope) - half, float(found.slope) + half)
