"""Errors of sums, losses and gradients of the study `accumulator`, with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qsim.studies.accumulator import SINGLE, SUMS, TRAINING, Run, Settings
from qsim.studies.findings import Findings
from qsim.studies.learners.text import VOCABULARY
from qsim.studies.report import Asked
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, difference, exponential, mean

#: DeepSeek-V3, Section 3.3: differences of the loss below 0.25 % are within the randomness of training.
SAME = 0.0025
#: The length of sums in the papers' claims.
LENGTH = 4096


class SumFindings(Findings[Settings, Run]):
    """The results of the study."""

    def __init__(self, study: Asked, settings: Settings, results: Sequence[Result[Run]]) -> None:
        super().__init__(study, settings, results)
        #: The number of products in the longest sums of the training: those of weight gradients, over all tokens.
        self.longest = settings.batch * settings.context
        #: The index of the length that is closest to the papers'.
        self.usual = min(range(len(settings.lengths)), key=lambda at: abs(settings.lengths[at] - LENGTH))

    def sums(self, what: str, operands: str, accumulate: str, at: int) -> list[float]:
        """A measured value of sums at one of the lengths, for each seed."""
        return [float(result[what][at]) for result in self.seeded(what=SUMS, operands=operands, accumulate=accumulate)]

    def growth(self, operands: str, accumulate: str) -> Interval:
        """The error of the longest sums relative to that of the shortest."""
        last, first = ([math.log(error) for error in self.sums("error", operands, accumulate, at)] for at in (-1, 0))
        return exponential(difference(last, first))

    def losses(self, accumulate: str) -> list[float]:
        """The loss for each seed; that of a diverged model is that of one that knows nothing."""
        return [min(loss, math.log(VOCABULARY)) for loss in self.over_seeds("loss", what=TRAINING, accumulate=accumulate)]

    def lost(self, accumulate: str) -> Interval:
        """The change of the loss against float32 sums with the same seed, as a share."""
        return mean([own / other - 1 for own, other in zip(self.losses(accumulate), self.losses(SINGLE), strict=True)])

    def gradients(self, accumulate: str) -> Interval:
        """The relative change of gradients against float32 sums."""
        return mean([float(result["gradients"][accumulate]) for result in self.seeded(what=TRAINING, accumulate=SINGLE)])
