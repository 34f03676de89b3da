"""Accuracies, gradients and factors of the study `batch-size`, with intervals over seeds."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from qsim.studies.batch_size import FULL, IMAGES, PLAIN, SCALES, STEPS, Settings, trained
from qsim.studies.findings import Findings, Values
from qsim.studies.learners import nets
from qsim.studies.learners.examples import unit
from qsim.studies.statistics import Interval, difference, exponential, geometric, mean

#: A training loss below this, in nats, is near zero: close to a stationary point.
NEAR_ZERO = 0.1


class BatchFindings(Findings[Settings]):
    """The results of a study, grouped by format, rounding, batch, loss scale and design."""

    def begin(self) -> None:
        """Name the ends of the grid, the examples, and the designs."""
        chosen = self.settings
        self.coarse, self.fine = chosen.formats[0], chosen.formats[-1]
        self.least, self.most = chosen.batches[0], chosen.batches[-1]
        #: The word for examples, and for the designs in which all batch sizes have equally many.
        self.unit = unit(chosen.model)
        self.one = self.unit[:-1]
        self.scale = nets.in_range(FULL, chosen.model)
        self.equal = {STEPS: "equal steps", IMAGES: f"equal {self.unit}"}
        self.doubles = [batch for batch in chosen.batches if 2 * batch in chosen.batches]
        self.middle, self.design = chosen.middle, chosen.designs[0]
        self.span = f"{self.coarse}, {self.least} to {self.most} {self.unit}"

    def how(self, design: str, scale: str) -> str:
        """A design and a loss scale in words."""
        return f"{self.equal[design]}, {SCALES[scale]}"

    def seeds(self, what: str, format: str, rounding: str, batch: int, scale: str, design: str = "", *, micro_batches: int = 1) -> Values:
        """One value for each seed; without a design, of the first."""
        found = self.seeded(**trained(self.settings, format, rounding, batch, scale, design or self.design, micro_batches))
        # Results of earlier versions, which all have ten classes, lack the accuracy of guessing, and the training loss.
        lacking = {"guessing": 0.1, "training_loss": math.nan}.get(what)
        return np.array([result[what] if lacking is None else result.values.get(what, lacking) for result in found])

    def factor(self, coarse: str, fine: str, scale: str) -> Interval:
        """Return the factor by which the batch must grow for gradients in the coarser format to vary as little, over seeds."""
        return geometric(self.over_seeds("factor", like=fine, format=coarse, loss_scale=scale))

    def gain(self, format: str, rounding: str, scale: str, design: str) -> Values:
        """The accuracy with the largest batch minus that with the smallest, for each seed."""
        most, least = (self.seeds("accuracy", format, rounding, batch, scale, design) for batch in (self.most, self.least))
        return most - least

    def beyond(self, rounding: str, scale: str, design: str, *, format: str = "") -> Interval:
        """By how much more accuracy a format, the coarsest if none is named, gains from the largest batch than full precision does."""
        return difference(self.gain(format or self.coarse, rounding, scale, design), self.gain(FULL, rounding, scale, design))

    def makes_up(self, coarse: str, fine: str, scale: str, design: str) -> Interval:
        """The factor by which the batch must grow for the coarser format to be as accurate as the finer one.

        For each seed, it is the distance between two parallel lines through the accuracies against the logarithm of the batch. That of full
        precision to itself is 1, however much it gains from larger batches. NaN if accuracy does not rise with the batch.
        """
        few, many = (
            np.array([self.seeds("accuracy", name, "stochastic", batch, scale, design) for batch in self.settings.batches])
            for name in (coarse, fine)
        )
        per_doubling = np.polyfit(np.log2(self.settings.batches), (few + many) / 2, 1)[0]
        lost = (many - few).mean(0)
        return exponential(mean(np.divide(lost, per_doubling, out=np.full_like(lost, math.nan), where=per_doubling > 0)) * math.log(2))

    def excess(self, format: str, rounding: str, batch: int, scale: str, design: str) -> Values:
        """The logarithm of the squared norm of the true gradient relative to that in full precision, for each seed."""
        own, full = (self.seeds("squared_gradient", name, rounding, batch, scale, design) for name in (format, FULL))
        return np.log(own) - np.log(full)

    def slope(self, rounding: str, scale: str, design: str, *, relative: bool = True) -> Interval:
        """The factor of the norm, relative to full precision or not, for every doubling of the batch: least squares for each seed."""
        ways = [(self.coarse, rounding, batch, scale, design) for batch in self.settings.batches]
        found = [self.excess(*way) if relative else np.log(self.seeds("squared_gradient", *way)) for way in ways]
        return mean(np.polyfit(np.log2(self.settings.batches), found, 1)[0])

    def highest_training_loss(self, design: str) -> float:
        """The mean training loss in full precision with the batch where it is highest: near zero, each norm is that of a stationary point.

        A norm that follows the test loss shows no convergence: both rise where a net that has not learnt with small batches overfits with
        large ones. NaN if results of an earlier version lack the training loss.
        """
        return max(float(self.seeds("training_loss", FULL, "nearest", batch, PLAIN, design).mean()) for batch in self.settings.batches)

    def leads(self, scale: str) -> list[Values]:
        """The accuracy of stochastic rounding minus that of nearest for each seed, in every format, with every batch and design."""
        chosen = self.settings
        # Designs share the middle batch size.
        cells = {(batch, chosen.updates(design, batch)): design for design in reversed(chosen.designs) for batch in chosen.batches}
        return [
            np.subtract(*(self.seeds("accuracy", name, rounding, batch, scale, design) for rounding in ("stochastic", "nearest")))
            for name, ((batch, _), design) in product(chosen.formats, cells.items())
        ]

    def ahead(self, scale: str) -> Interval:
        """The accuracy of stochastic rounding minus that of nearest, in the coarsest format with the largest batch."""
        return difference(*(self.seeds("accuracy", self.coarse, rounding, self.most, scale) for rounding in ("stochastic", "nearest")))

    def learnt(self, scale: str) -> Interval:
        """The share that nearest learns in the coarsest format with the largest batch."""
        return mean(self.shares("nearest", self.most, scale))

    def shares(self, rounding: str, batch: int, scale: str, design: str = "") -> Values:
        """The accuracy in the coarsest format for each seed: 0 is guessing, 1 is full precision with the same batch."""
        own, full, guess = (
            self.seeds(what, name, rounding, batch, scale, design)
            for what, name in (("accuracy", self.coarse), ("accuracy", FULL), ("guessing", FULL))
        )
        return (own - guess) / (full - guess)
