"""Bounds on the probability of a count, without a statistics package."""

from __future__ import annotations

import math

from torch import Tensor

#: A statistical test may fail by chance once in a billion runs.
ERROR_PROBABILITY = 1e-9


def surprise(successes: int, trials: int, p: float) -> float:
    """An upper bound on the probability that a fair count deviates at least as far as this one, on the same side.

    Chernoff's bound: of `n` trials with probability `p`, at least (at most) a share `s` beyond `p` succeed with a probability of no more
    than `exp(-n * KL(s, p))`, KL being the divergence of two coins. Doubled, for both sides.
    """
    share = successes / trials
    if p in (0.0, 1.0):
        return 1.0 if share == p else 0.0
    divergence = sum(a * math.log(a / b) for a, b in ((share, p), (1 - share, 1 - p)) if a > 0)
    return min(1.0, 2 * math.exp(-trials * divergence))


def check_share(successes: int, trials: int, p: float, tests: int = 1) -> None:
    """Assert that a count is compatible with a probability, allowing for the number of counts."""
    bound = surprise(successes, trials, p)
    assert bound * tests >= ERROR_PROBABILITY, f"{successes} of {trials} where {p:.6g} was due: at most {bound:.1e} likely"


def bernstein(variance: float, width: float, count: int, tests: int = 1) -> float:
    """Bernstein's bound for a mean of independent numbers that differ from each other by at most a width.

    Args:
        variance: The variance of one number, or a bound on it.
        width: The width.
        count: The number of numbers.
        tests: The number of such means.
    """
    log = math.log(2 * tests / ERROR_PROBABILITY)
    return math.sqrt(2 * variance * log / count) + width * log / (3 * count)


def surprise_of_mean(t: float, degrees: int) -> float:
    """An upper bound on the probability that Student's t is at least this large in magnitude.

    With an even number of degrees of freedom, v, and cos² = 1 / (1 + t² / v), the tail is `sin * sum(binomial(2k, k) / 4**k * cos**2k)`
    over all `k >= v / 2`. The coefficients fall with `k`: the first one times a geometric series bounds the sum.
    """
    if degrees % 2:
        raise ValueError(f"an even number of degrees of freedom, not {degrees}")
    half = degrees // 2
    squared = 1 / (1 + t * t / degrees)
    first = math.comb(degrees, half) / 4**half
    return min(1.0, first * squared**half / math.sqrt(1 - squared)) if t else 1.0


def check_means(samples: Tensor, due: Tensor) -> None:
    """Assert that the columns of independent, normally distributed samples are compatible with the expected means.

    The samples are an odd number of rows. The few columns that do not vary must be what is due, to a millionth of the largest.
    """
    count = len(samples)
    off = (samples.mean(0) - due).abs()
    scale = samples.std(0) / math.sqrt(count)
    varies = scale > 1e-9 * due.abs().max()
    assert varies.double().mean() > 0.5, "too few columns vary"
    assert (off[~varies] <= 1e-6 * due.abs().max()).all(), "columns that do not vary are not what is due"
    worst = (off / scale)[varies].max().item()
    bound = surprise_of_mean(worst, count - 1)
    assert bound * len(off) >= ERROR_PROBABILITY, f"a mean is off by {worst:.1f} standard errors: at most {bound:.1e} likely"
