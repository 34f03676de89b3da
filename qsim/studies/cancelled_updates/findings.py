"""Shares of cancelled updates, accuracies and losses of the study `cancelled-updates`, by format, update and layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qsim.studies.cancelled_updates import FULL, KAHAN, NEAREST, STOCHASTIC, Run, Settings
from qsim.studies.findings import Findings
from qsim.studies.report import Asked
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, exponential, mean


class UpdateFindings(Findings[Settings, Run]):
    """The results of a study, grouped by format, update and layers."""

    def __init__(self, study: Asked, settings: Settings, results: Sequence[Result[Run]]) -> None:
        super().__init__(study, settings, results)
        self.coarse = settings.formats[-1]
        self.layers = 1 + max(run.kahan_layers for run in self._of)

    def seeds(self, format: str, update: str, kahan_layers: int = 0) -> list[Result[Run]]:
        """The results of each seed."""
        if kahan_layers == self.layers:
            update, kahan_layers = KAHAN, 0
        return self.seeded(format=format, update=update, kahan_layers=kahan_layers, unit="")

    def in_unit(self, unit: str) -> list[float]:
        """The accuracy of each seed with float32 weights and updates, everything else computed in a format."""
        return self.over_seeds("accuracy", unit=unit)

    def of(self, what: str, format: str, update: str, kahan_layers: int = 0) -> list[float]:
        """One value for each seed."""
        return [float(result[what]) for result in self.seeds(format, update, kahan_layers)]

    def steps(self) -> list[int]:
        """The steps whose updates are counted."""
        return [int(count[0]) for count in self.seeds(FULL, NEAREST)[0]["counts"]]

    def shares(self, format: str, update: str, *, lost: bool = False) -> NDArray[np.float64]:
        """The share of updates that are cancelled, or cancelled and not carried: seeds × steps."""
        counts = np.array([result["counts"] for result in self.seeds(format, update)], dtype=np.float64)
        _, updates, cancelled, carried = np.moveaxis(counts, 2, 0)
        found: NDArray[np.float64] = (cancelled - carried if lost else cancelled) / np.maximum(updates, 1)
        return found

    def memory(self, kahan_layers: int) -> float:
        """Return the mean bytes per weight with Kahan updates in some layers."""
        return self.of("memory", self.settings.mixed, STOCHASTIC, kahan_layers)[0]

    def quarter(self, format: str, update: str, which: int) -> list[float]:
        """The share in the first or the last quarter of training, for each seed."""
        return [float(part.mean()) for part in np.array_split(self.shares(format, update), 4, axis=1)[which]]

    def curve(self, format: str, update: str, unit: str = "") -> NDArray[np.float64]:
        """Steps done, the mean loss of batches until then, and the test accuracy: seeds × points × 3."""
        found = self.seeded(format=format, update=update, kahan_layers=0, unit=unit)
        return np.array([result["curve"] for result in found], dtype=np.float64)

    def loss(self, format: str, update: str, kahan_layers: int = 0) -> Interval:
        """The training loss at the end, a geometric mean."""
        return exponential(mean(np.log(self.of("loss", format, update, kahan_layers)).tolist()), most=10.0)
