"""Means and slopes over several seeds, with intervals, the effects that these can show, and decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

#: The confidence of intervals, unless `confidence` sets another, and the probability with which an effect of the size `detects` is found.
CONFIDENCE, POWER = 0.95, 0.8
_level = ContextVar("confidence", default=CONFIDENCE)


@contextmanager
def confidence(level: float) -> Iterator[None]:
    """Compute all intervals with another confidence in this context.

    Example:
        >>> with confidence(0.99):
        ...     print(confidence_text(), mean([1.0, 2.0, 3.0]))
        99 % 2 [-3.73, 7.73]
    """
    token = _level.set(level)
    try:
        yield
    finally:
        _level.reset(token)


@contextmanager
def shared(count: int) -> Iterator[None]:
    """Compute intervals in this context so that `count` of them hold together with the confidence of one (Bonferroni's correction).

    Example:
        >>> with shared(5):
        ...     print(confidence_text(), mean([1.0, 2.0, 3.0]))
        99 % 2 [-3.73, 7.73]
    """
    with confidence(1 - (1 - _level.get()) / count):
        yield


def confidence_text() -> str:
    """The confidence of intervals, for texts.

    Example:
        >>> confidence_text()
        '95 %'
    """
    return f"{100 * _level.get():.3g} %"


def describe_bars() -> str:
    """The description of a figure's bars.

    Example:
        >>> describe_bars()
        'Bars: 95 % intervals over seeds.'
    """
    return f"Bars: {confidence_text()} intervals over seeds."


def normal() -> float:
    """Return half the width of a normal distribution's interval, in standard deviations.

    Example:
        >>> round(normal(), 2)
        1.96
    """
    return float(special.ndtri(0.5 + _level.get() / 2))


@dataclass(frozen=True)
class Interval:
    """An estimate, and the bounds of its confidence interval.

    Attributes:
        value: The estimate.
        low: The lower bound.
        high: The upper bound.
        detects: The smallest true value for which an interval of this kind excludes zero in four of five studies with as many seeds and
            the same spread; for ratios, the smallest factor whose interval excludes 1. NaN if it is not known.

    Example:
        >>> print(Interval(0.8124, 0.8012, 0.8231))
        0.8124 [0.8012, 0.8231]
        >>> print(f"{Interval(0.8124, 0.8012, 0.8231):.1%}")
        81.2% [80.1%, 82.3%]
    """

    value: float
    low: float
    high: float
    detects: float = math.nan

    def __format__(self, spec: str) -> str:
        return " ".join((format(self.value, spec or ".4g"), f"[{format(self.low, spec or '.4g')}, {format(self.high, spec or '.4g')}]"))

    def __str__(self) -> str:
        return format(self, "")

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def __mul__(self, factor: float) -> Interval:
        """The interval in another unit, by a factor above zero."""
        return Interval(*(factor * number for number in (self.value, self.low, self.high, self.detects)))

    def clipped(self, low: float, high: float = math.inf) -> Interval:
        """The interval inside of what a figure can show."""
        return Interval(self.value, max(self.low, low), min(self.high, high))

    @property
    def points(self) -> Interval:
        """A share in percent, or a difference of shares in points."""
        return self * 100


def in_points(found: Interval) -> str:
    """A difference of accuracies in points.

    Example:
        >>> in_points(Interval(0.015, 0.0, 0.03))
        '+1.5 [+0.0, +3.0]'
    """
    return f"{found * 100:+.1f}"


def mean(values: ArrayLike) -> Interval:
    """The mean with Student's interval; with one value, the interval contains all numbers.

    For quantities that may have any value. `proportion` and `positive` have intervals that stay within bounds.

    Example:
        >>> print(mean([1.0, 2.0, 3.0]))
        2 [-0.4841, 4.484]
        >>> round(mean([1.0, 2.0, 3.0]).detects, 2)
        3.1
    """
    center, error, count = _center_and_error(values)
    if count < 2:
        return Interval(center, -math.inf, math.inf, math.inf)
    t = _student(count)
    return Interval(center, center - t * error, center + t * error, (t + float(special.stdtrit(count - 1, POWER))) * error)


def proportion(values: ArrayLike) -> Interval:
    """The mean of shares, with Student's interval in log odds, which is between 0 and 1.

    Example:
        >>> print(f"{proportion([0.97, 0.99, 0.80]):.1%}")
        92.0% [25.3%, 99.7%]
    """
    center, error, count = _center_and_error(values)
    if not 0 < center < 1:
        return Interval(center, center, center) if error == 0 else Interval(center, 0.0, 1.0)
    half = _student(count) * error / (center * (1 - center))
    odds = math.log(center / (1 - center))
    low, high = (1 / (1 + math.exp(min(-at, 700))) for at in (odds - half, odds + half))
    # Where all shares are equal, the way to log odds and back may end on the wrong side of the mean.
    return Interval(center, min(low, center), max(center, high))


def positive(values: ArrayLike) -> Interval:
    """The mean of numbers above zero, with Student's interval in logarithms, which is above zero.

    Example:
        >>> print(positive([0.001, 0.002, 0.006]))
        0.003 [0.0003355, 0.02683]
    """
    center, error, count = _center_and_error(values)
    if not center > 0 or not math.isfinite(center):
        return Interval(center, center, center)
    half = _student(count) * error / center
    return Interval(center, center * math.exp(-half), center * math.exp(min(half, 700)))


def _center_and_error(values: ArrayLike) -> tuple[float, float, int]:
    """The mean, its standard error, and the number of values."""
    each: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # losses of models that diverged are infinite
        error = float(each.std(ddof=1) / math.sqrt(len(each))) if len(each) > 1 else math.inf
    return float(each.mean()), error, len(each)


def _student(count: int) -> float:
    return float(special.stdtrit(count - 1, 0.5 + _level.get() / 2)) if count > 1 else math.inf


def above(found: Interval, bound: float = 0.0) -> bool | None:
    """Whether an estimate is above a bound; None if the bound is in its interval.

    Example:
        >>> above(Interval(1.0, 0.5, 1.5)), above(Interval(-1.0, -1.5, -0.5)), above(Interval(0.1, -0.4, 0.6))
        (True, False, None)
    """
    return True if found.low > bound else False if found.high < bound else None


def below(found: Interval, bound: float = 0.0) -> bool | None:
    """Whether an estimate is below a bound; None if the bound is in its interval."""
    return True if found.high < bound else False if found.low > bound else None


def within(found: Interval, low: float, high: float) -> bool | None:
    """Whether a whole interval is inside bounds; None if only a part of it is.

    Example:
        >>> within(Interval(1.0, 0.9, 1.1), 0.8, 1.2), within(Interval(2.0, 1.9, 2.1), 0.8, 1.2), within(Interval(1.0, 0.5, 1.5), 0.8, 1.2)
        (True, False, None)
    """
    if low <= found.low and found.high <= high:
        return True
    return False if found.high < low or found.low > high else None


def both(*verdicts: bool | None) -> bool | None:
    """Whether all verdicts are yes; no if one is, undecided otherwise.

    Example:
        >>> both(True, True), both(True, None), both(None, False)
        (True, None, False)
    """
    return False if False in verdicts else None if None in verdicts else True


def difference(first: ArrayLike, second: ArrayLike) -> Interval:
    """The mean of `first` minus that of `second`, seed by seed: both begin with the same weights and see the same batches."""
    with np.errstate(invalid="ignore"):  # of two models that diverged there is none
        return mean(np.subtract(first, second))


def geometric(values: ArrayLike, most: float = math.inf) -> Interval:
    """The geometric mean, whose interval is computed in logarithms and limited to `most`.

    Example:
        >>> f"{geometric([1.0, 4.0]).value:.3f}"
        '2.000'
    """
    return exponential(mean(np.log(values)), most)


def ratio(first: ArrayLike, second: ArrayLike) -> Interval:
    """The geometric mean of the ratio of `first` to `second`, seed by seed."""
    return geometric(np.divide(first, second))


def exponential(interval: Interval, most: float = math.inf) -> Interval:
    """The exponential of an estimate in logarithms, limited to `most`.

    Example:
        >>> print(exponential(Interval(0.0, -1.0, 1.0)))
        1 [0.3679, 2.718]
    """
    value, low, high = (min(math.inf if bound >= 700 else math.exp(bound), most) for bound in (interval.value, interval.low, interval.high))
    return Interval(value, low, high, math.exp(min(interval.detects, 700)))


def slope(x: ArrayLike, y: ArrayLike) -> Interval:
    """The slope of a straight line through log y against log x, with Student's interval of least squares.

    Example:
        >>> print(f"{slope([1, 2, 4, 8], [8.0, 4.1, 1.9, 1.0]):.2f}")
        -1.01 [-1.11, -0.91]
    """
    from scipy.stats import linregress  # takes a second to import, and few studies need it

    found = linregress(np.log(x), np.log(y))
    half = float(special.stdtrit(np.size(x) - 2, 0.5 + _level.get() / 2) * found.stderr)
    return Interval(float(found.slope), float(found.slope) - half, float(found.slope) + half)
