"""The descents of the study `stagnation`, grouped by method."""

from __future__ import annotations

from typing import Any

import qsim
from qsim.studies.findings import Findings
from qsim.studies.stagnation import Settings
from qsim.studies.stagnation.bounds import Curves
from qsim.studies.stagnation.least_squares import ALL, NEAREST, ONE


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
