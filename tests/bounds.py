"""How unlikely a count is, bounded without a statistics package."""

from __future__ import annotations

import math

#: A statistical test may fail for no reason once in a billion runs.
ERROR_PROBABILITY = 1e-9


def surprise(successes: int, trials: int, p: float) -> float:
    """An upper bound on the probability that a fair count is at least as far off on its side as this one.

    Chernoff's bound: of `n` trials with probability `p`, at least (at most) a share `s` beyond `p` succeed with a probability of no more
    than `exp(-n * KL(s, p))`, KL being the divergence of two coins. Doubled, for both sides.
    """
    share = successes / trials
    if p in (0.0, 1.0):
        return 1.0 if share == p else 0.0
    divergence = sum(a * math.log(a / b) for a, b in ((share, p), (1 - share, 1 - p)) if a > 0)
    return min(1.0, 2 * math.exp(-trials * divergence))


def check_share(successes: int, trials: int, p: float, tests: int = 1) -> None:
    """Asserts that a count is compatible with a probability, allowing for how many counts are looked at."""
    bound = surprise(successes, trials, p)
    assert bound * tests >= ERROR_PROBABILITY, f"{successes} of {trials} where {p:.6g} was due: at most {bound:.1e} likely"
