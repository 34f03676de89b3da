"""Accuracies, gradients and factors of the study `batch-size`, with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qsim.studies.batch_size import FULL, IMAGES, PLAIN, SCALES, STEPS, Run, Settings, trained
from qsim.studies.findings import Findings
from qsim.studies.learners import nets
from qsim.studies.learners.examples import unit
from qsim.studies.report import Asked
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, above, difference, exponential, mean

#: A training loss below this, in nats, is near zero: close to a stationary point.
NEAR_ZERO = 0.1


class BatchFindings(Findings[Settings, Run]):
    """The results of a study, grouped by format, rounding, batch, loss scale and design."""

    def __init__(self, study: Asked, settings: Settings, results: Sequence[Result[Run]]) -> None:
        super().__init__(study, settings, results)
        self.coarse, self.fine = settings.formats[0], settings.formats[-1]
        self.least, self.most = settings.batches[0], settings.batches[-1]
        #: The word for examples, and for the designs in which all batch sizes have equally many.
        self.unit = unit(settings.model)
        self.one = self.unit[:-1]
        self.scale = nets.in_range(FULL, settings.model)
        self.equal = {STEPS: "equal steps", IMAGES: f"equal {self.unit}"}
        self.doubles = [batch for batch in settings.batches if 2 * batch in settings.batches]
        self.middle, self.design = settings.middle, settings.designs[0]
        self.span = f"{self.coarse}, {self.least} to {self.most} {self.unit}"

    def how(self, design: str, scale: str) -> str:
        """A design and a loss scale in words."""
        return f"{self.equal[design]}, {SCALES[scale]}"

    def seeds(
        self, what: str, format: str, rounding: str, batch: int, scale: str, design: str = "", *, micro_batches: int = 1
    ) -> list[float]:
        """One value for each seed; without a design, of the first."""
        ways = (format, rounding, batch, scale, design or self.design)
        found = [self._of[trained(self.settings, *ways, seed, micro_batches)].values for seed in range(self.settings.seeds)]
        # Results of earlier versions, which all have ten classes, lack the accuracy of guessing.
        return [float(values.get("guessing", 0.1) if what == "guessing" else values[what]) for values in found]

    def factor(self, coarse: str, fine: str, scale: str) -> Interval:
        """Return the factor by which the batch must grow for gradients in the coarser format to vary as little, over seeds."""
        found = [
            result for result in self._of.values() if (result.run.like, result.run.format, result.run.loss_scale) == (fine, coarse, scale)
        ]
        return exponential(mean([math.log(result["factor"]) for result in found]))

    def gain(self, format: str, rounding: str, scale: str, design: str) -> list[float]:
        """The accuracy with the largest batch minus that with the smallest, for each seed."""
        most, least = (self.seeds("accuracy", format, rounding, batch, scale, design) for batch in (self.most, self.least))
        return [a - b for a, b in zip(most, least, strict=True)]

    def beyond(self, rounding: str, scale: str, design: str, *, format: str = "") -> Interval:
        """By how much more accuracy a format, the coarsest if none is named, gains from the largest batch than full precision does."""
        return difference(self.gain(format or self.coarse, rounding, scale, design), self.gain(FULL, rounding, scale, design))

    def doubled(self, coarse: str, fine: str, scale: str, design: str) -> Interval:
        """The accuracy in the coarser format with twice the batch minus that in the finer one, over the batches that have a double."""
        twice, once = (
            np.mean([self.seeds("accuracy", name, "stochastic", factor * batch, scale, design) for batch in self.doubles], 0).tolist()
            for name, factor in ((coarse, 2), (fine, 1))
        )
        return difference(twice, once)

    def excess(self, format: str, rounding: str, batch: int, scale: str, design: str) -> list[float]:
        """The logarithm of the squared norm of the true gradient relative to that in full precision, for each seed."""
        own, full = (np.log(self.seeds("squared_gradient", name, rounding, batch, scale, design)) for name in (format, FULL))
        return [float(a - b) for a, b in zip(own, full, strict=True)]

    def slope(self, rounding: str, scale: str, design: str, *, relative: bool = True) -> Interval:
        """The factor of the norm, relative to full precision or not, for every doubling of the batch: least squares for each seed."""
        ways = [(self.coarse, rounding, batch, scale, design) for batch in self.settings.batches]
        found = [self.excess(*way) if relative else np.log(self.seeds("squared_gradient", *way)).tolist() for way in ways]
        slopes = np.polyfit(np.log2(self.settings.batches), found, 1)[0]
        return mean(slopes.tolist())

    def converges(self, design: str) -> bool:
        """Whether the norm shows convergence: in full precision, training loss is near zero, or the norm follows the test loss."""
        batches = self.settings.batches
        first = self._of[trained(self.settings, FULL, "nearest", batches[0], PLAIN, design, 0)]
        # Results of earlier versions lack the training loss.
        if "training_loss" in first.values and all(
            mean(self.seeds("training_loss", FULL, "nearest", batch, PLAIN, design)).value < NEAR_ZERO for batch in batches
        ):
            return True
        full = {
            what: [self.seeds(what, FULL, "nearest", batch, PLAIN, design) for batch in batches] for what in ("squared_gradient", "loss")
        }
        directions = {above(mean(np.polyfit(np.log2(batches), np.log(values), 1)[0].tolist())) for values in full.values()}
        return directions in ({True}, {False})

    def ahead(self, scale: str) -> Interval:
        """The accuracy of stochastic rounding minus that of nearest, in the coarsest format with the largest batch."""
        return difference(*(self.seeds("accuracy", self.coarse, rounding, self.most, scale) for rounding in ("stochastic", "nearest")))

    def learnt(self, scale: str) -> Interval:
        """The share that nearest learns in the coarsest format with the largest batch."""
        return mean(self.shares("nearest", self.most, scale))

    def shares(self, rounding: str, batch: int, scale: str, design: str = "") -> list[float]:
        """The accuracy in the coarsest format for each seed: 0 is guessing, 1 is full precision with the same batch."""
        own, full, guess = (
            self.seeds(what, name, rounding, batch, scale, design)
            for what, name in (("accuracy", self.coarse), ("accuracy", FULL), ("guessing", FULL))
        )
        return [(a - c) / (b - c) for a, b, c in zip(own, full, guess, strict=True)]
