"""Descents beside the bounds of the theorems of *Revisiting BFloat16 Training*.

Theorem 1 bounds the distance of weights that are rounded to nearest from below by `e * (1 - a) / (a + e) * m`: `a` is the learning rate
times the Lipschitz constant L, `m` the smallest magnitude in the optimum, `e` the most by which rounding is off, relative to the number.
Two steps of its proof do not hold as they stand:

- It takes an update up to `e * |w|` for lost. But neighbours may be as little as `e * |w|` apart, and what is lost for certain is half of
  that. With `h = e / 2`, the ball of weights that stay where they are is `h / (a + h) * m` wide.
- It takes the step that enters this ball as it was before rounding. Rounding to nearest may double it, not more: the old weight is a level
  as well, so the new one is no farther from the exact one than the old one is. So a step from outside the ball ends no closer to the
  optimum than `1 - 2 * a` times the distance from which it began.

What does hold is `h * (1 - 2 * a) / (a + h) * m`, about half of what is printed. In ten dimensions weights reach neither: the norm over all
dimensions stands against the smallest weight alone. With a single weight the difference shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qsim.studies.result import Result
from qsim.studies.stagnation import Run

Array = NDArray[np.float64]


class Curves:
    """The problems of all seeds, solved in one way.

    Args:
        results: Of one run for each seed.
        epsilon: The relative error of rounding.
    """

    def __init__(self, results: Sequence[Result[Run]], epsilon: float) -> None:
        def joined(name: str, axis: int = 0) -> Array:
            return np.concatenate([np.asarray(result[name], dtype=np.float64) for result in results], axis)

        self.steps = np.asarray(results[0]["steps"], dtype=np.float64)
        self.distances, self.losses = joined("distances", 1), joined("losses", 1)
        self.lowest, self.start, self.convexity, self.lipschitz = map(joined, ("lowest", "start", "convexity", "lipschitz"))
        self._rate, self._epsilon, self._smallest = results[0].run.rate, epsilon, joined("smallest")

    @property
    def printed(self) -> Array:
        """The bound of Theorem 1."""
        a, e = self._rate * self.lipschitz, self._epsilon
        bound: Array = np.minimum(e * (1 - a) / (a + e) * self._smallest, self.start)
        return bound

    @property
    def holding(self) -> Array:
        """The bound that its proof gives once it is corrected."""
        a, h = self._rate * self.lipschitz, self._epsilon / 2
        bound: Array = np.minimum(h * (1 - 2 * a) / (a + h) * self._smallest, self.start)
        return bound

    @property
    def final(self) -> Array:
        """The distances at the end."""
        last: Array = self.distances[-1]
        return last

    def beside_theorem_2(self) -> Array:
        """At each point of each problem: the squared distance, in units of Theorem 2's bound."""
        exponent = -self._rate * (self.convexity - 4 * self._epsilon * self.lipschitz) * self.steps[:, None]
        # In logarithms: the bound falls below any number. A squared distance of 0 is below any bound.
        with np.errstate(divide="ignore"):
            beside: Array = np.exp(2 * np.log(self.distances / self.start) - exponent)
        return beside
