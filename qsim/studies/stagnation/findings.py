"""The descents of the study `stagnation`, grouped by method, and the bounds of the theorems of *Revisiting BFloat16 Training*.

Theorem 1 is a lower bound of the distance from the optimum for weights that are rounded to nearest. Two steps of its proof do not hold as
published; `docs/derivations.md` derives the bound that does, about half as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qsim
from qsim.studies.findings import Findings
from qsim.studies.result import Result
from qsim.studies.stagnation import Settings
from qsim.studies.stagnation.least_squares import ALL, NEAREST, ONE
from qsim.studies.study import Run

Array = NDArray[np.float64]


class Curves:
    """The problems of all seeds, solved in one way.

    Args:
        results: The result of one run per seed.
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
        """The bound of Theorem 1, as published."""
        a, e = self._rate * self.lipschitz, self._epsilon
        bound: Array = np.minimum(e * (1 - a) / (a + e) * self._smallest, self.start)
        return bound

    @property
    def holding(self) -> Array:
        """The bound that its corrected proof gives."""
        a, h = self._rate * self.lipschitz, self._epsilon / 2
        bound: Array = np.minimum(h * (1 - 2 * a) / (a + h) * self._smallest, self.start)
        return bound

    @property
    def final(self) -> Array:
        """The distances at the end."""
        last: Array = self.distances[-1]
        return last

    def beside_theorem_2(self) -> Array:
        """The squared distance in units of Theorem 2's bound, for each problem at each point of the curve."""
        exponent = -self._rate * (self.convexity - 4 * self._epsilon * self.lipschitz) * self.steps[:, None]
        # In logarithms, because the bound underflows. A squared distance of 0 is below any bound.
        with np.errstate(divide="ignore"):
            beside: Array = np.exp(2 * np.log(self.distances / self.start) - exponent)
        return beside


class DescentFindings(Findings[Settings]):
    """The results of a study, grouped by method."""

    def begin(self) -> None:
        """Find the largest relative error of rounding."""
        # The epsilon of formats is the distance between 1 and the next number; the rounding error is at most half of it.
        self.epsilon = qsim.format(self.settings.format).epsilon / 2

    def whole(self, method: str, rate: float) -> Curves:
        """Runs with the gradient of all samples."""
        return self._curves(gradient=ALL, method=method, rate=rate, dimensions=self.settings.dimensions)

    def single(self, method: str, noise: float = 0.0) -> Curves:
        """Runs with the gradient of one sample."""
        return self._curves(gradient=ONE, method=method, noise=noise)

    def lone(self, rate: float) -> Curves:
        """Runs of single weights, rounded to nearest."""
        return self._curves(gradient=ALL, method=NEAREST, rate=rate, dimensions=1)

    def _curves(self, **fields: Any) -> Curves:
        return Curves(self.seeded(**fields), self.epsilon)
