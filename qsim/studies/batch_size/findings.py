"""Accuracies, gradients and factors of the study `batch-size`, with intervals over seeds."""

from __future__ import annotations

import numpy as np

from qsim.studies.batch_size import FULL, IMAGES, PLAIN, SCALES, STEPS, Settings, trained
from qsim.studies.findings import Findings, Values
from qsim.studies.learners import nets
from qsim.studies.learners.examples import unit
from qsim.studies.statistics import Interval, above, difference, geometric, mean

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
        # Results of earlier versions, which all have ten classes, lack the accuracy of guessing.
        lacking = {"guessing": 0.1}.get(what)
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

    def doubled(self, coarse: str, fine: str, scale: str, design: str) -> Interval:
        """The accuracy in the coarser format with twice the batch minus that in the finer one, over the batches that have a double."""
        twice, once = (
            np.mean([self.seeds("accuracy", name, "stochastic", factor * batch, scale, design) for batch in self.doubles], 0)
            for name, factor in ((coarse, 2), (fine, 1))
        )
        return difference(twice, once)

    def excess(self, format: str, rounding: str, batch: int, scale: str, design: str) -> Values:
        """The logarithm of the squared norm of the true gradient relative to that in full precision, for each seed."""
        own, full = (self.seeds("squared_gradient", name, rounding, batch, scale, design) for name in (format, FULL))
        return np.log(own) - np.log(full)

    def slope(self, rounding: str, scale: str, design: str, *, relative: bool = True) -> Interval:
        """The factor of the norm, relative to full precision or not, for every doubling of the batch: least squares for each seed."""
        ways = [(self.coarse, rounding, batch, scale, design) for batch in self.settings.batches]
        found = [self.excess(*way) if relative else np.log(self.seeds("squared_gradient", *way)) for way in ways]
        return mean(np.polyfit(np.log2(self.settings.batches), found, 1)[0])

    def converges(self, design: str) -> bool:
        """Whether the norm shows convergence: in full precision, training loss is near zero, or the norm follows the test loss."""
        batches = self.settings.batches

        def full(what: str) -> list[Values]:
            return [self.seeds(what, FULL, "nearest", batch, PLAIN, design) for batch in batches]

        # Results of earlier versions lack the training loss.
        first = self.seeded(**trained(self.settings, FULL, "nearest", batches[0], PLAIN, design))[0]
        if "training_loss" in first.values and all(losses.mean() < NEAR_ZERO for losses in full("training_loss")):
            return True
        slopes = [np.polyfit(np.log2(batches), np.log(full(what)), 1)[0] for what in ("squared_gradient", "loss")]
        return {above(mean(slope)) for slope in slopes} in ({True}, {False})

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
