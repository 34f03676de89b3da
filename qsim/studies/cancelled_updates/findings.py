"""Shares of cancelled updates, accuracies and losses of the study `cancelled-updates`, by format, update and layers."""

from __future__ import annotations

import numpy as np

from qsim.studies.cancelled_updates import FULL, KAHAN, NEAREST, STOCHASTIC, Settings, way
from qsim.studies.findings import Findings, Values
from qsim.studies.statistics import Interval, geometric


class UpdateFindings(Findings[Settings]):
    """The results of a study, grouped by format, update and layers."""

    def begin(self) -> None:
        """Find the coarsest format, and the number of layers."""
        self.coarse = self.settings.formats[-1]
        self.layers = 1 + max(result.run.kahan_layers for result in self.results)

    def in_unit(self, unit: str) -> Values:
        """The accuracy of each seed with float32 weights and updates, everything else computed in a format."""
        return self.over_seeds("accuracy", unit=unit)

    def of(self, what: str, format: str, update: str, kahan_layers: int = 0) -> Values:
        """One value for each seed."""
        return self.over_seeds(what, **(way(format, KAHAN) if kahan_layers == self.layers else way(format, update, kahan_layers)))

    def steps(self) -> list[int]:
        """The steps whose updates are counted."""
        return [int(count[0]) for count in self.seeded(**way(FULL, NEAREST))[0]["counts"]]

    def shares(self, format: str, update: str, *, lost: bool = False) -> Values:
        """The share of updates that are cancelled, or cancelled and not carried: seeds × steps."""
        counts = np.array([result["counts"] for result in self.seeded(**way(format, update))], dtype=np.float64)
        _, updates, cancelled, carried = np.moveaxis(counts, 2, 0)
        found: Values = (cancelled - carried if lost else cancelled) / np.maximum(updates, 1)
        return found

    def memory(self, kahan_layers: int) -> float:
        """Return the mean bytes per weight with Kahan updates in some layers."""
        return float(self.of("memory", self.settings.mixed, STOCHASTIC, kahan_layers)[0])

    def quarter(self, format: str, update: str, which: int) -> Values:
        """The share in the first or the last quarter of training, for each seed."""
        found: Values = np.array_split(self.shares(format, update), 4, axis=1)[which].mean(1)
        return found

    def curve(self, format: str, update: str, unit: str = "") -> Values:
        """Steps done, the mean loss of batches until then, and the test accuracy: seeds × points × 3."""
        return np.array([result["curve"] for result in self.seeded(**way(format, update, unit=unit))], dtype=np.float64)

    def loss(self, format: str, update: str, kahan_layers: int = 0) -> Interval:
        """The training loss at the end, a geometric mean."""
        return geometric(self.of("loss", format, update, kahan_layers), most=10.0)
