"""Errors of sums, losses and gradients of the study `accumulator`, with intervals over seeds."""

from __future__ import annotations

import math

import numpy as np

from qsim.studies.accumulator import SINGLE, SUMS, TRAINING, Settings
from qsim.studies.findings import Findings, Values
from qsim.studies.learners.text import VOCABULARY
from qsim.studies.statistics import Interval, mean, ratio

#: DeepSeek-V3, Section 3.3: differences of the loss below 0.25 % are within the randomness of training.
SAME = 0.0025
#: The length of sums in the papers' claims.
LENGTH = 4096


class SumFindings(Findings[Settings]):
    """The results of the study."""

    def begin(self) -> None:
        """Find the lengths that the claims are about."""
        chosen = self.settings
        #: The number of products in the longest sums of the training: those of weight gradients, over all tokens.
        self.longest = chosen.batch * chosen.context
        #: The index of the length that is closest to the papers'.
        self.usual = min(range(len(chosen.lengths)), key=lambda at: abs(chosen.lengths[at] - LENGTH))

    def sums(self, what: str, operands: str, accumulate: str, at: int) -> list[float]:
        """A measured value of sums at one of the lengths, for each seed."""
        return [float(result[what][at]) for result in self.seeded(what=SUMS, operands=operands, accumulate=accumulate)]

    def growth(self, operands: str, accumulate: str) -> Interval:
        """The error of the longest sums relative to that of the shortest."""
        return ratio(*(self.sums("error", operands, accumulate, at) for at in (-1, 0)))

    def losses(self, accumulate: str) -> Values:
        """The loss for each seed; that of a diverged model is that of one that knows nothing."""
        return np.minimum(self.over_seeds("loss", what=TRAINING, accumulate=accumulate), math.log(VOCABULARY))

    def lost(self, accumulate: str) -> Interval:
        """The change of the loss against float32 sums with the same seed, as a share."""
        return mean(self.losses(accumulate) / self.losses(SINGLE) - 1)

    def gradients(self, accumulate: str) -> Interval:
        """The relative change of gradients against float32 sums."""
        return mean([float(result["gradients"][accumulate]) for result in self.seeded(what=TRAINING, accumulate=SINGLE)])
