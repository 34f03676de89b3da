"""The report of the study `replications`: a power, a length, two ratios and two losses, each with the rule of its claim."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.findings import Findings, Values
from qsim.studies.replications import ALL, DESCENT, FULL, PRODUCTS, RING, ROLLOUT, STUDENT, SUMS, Settings
from qsim.studies.replications.measurements import LEFT, NUMBERS
from qsim.studies.report import Claim, Picture
from qsim.studies.statistics import Interval, above, below, difference, exponential, geometric, mean, positive, ratio, within
from qsim.text.tables import Table

#: The ratio of norms below which training is said to be less effective, and the rules' bounds, which the wording explains.
_THRESHOLD, _AROUND = math.sqrt(3), 0.1
_RUNAWAY, _ELIMINATED, _HALF = 10.0, 0.1, 0.5


class Written(Findings[Settings]):
    """The results, by measurement."""

    def power(self, name: str) -> Interval:
        """The power of the number of ranks with which an error grows."""
        return mean([float(np.polyfit(np.log(own.run.sizes), np.log(own[name]), 1)[0]) for own in self.seeded(what=RING)])

    def times(self) -> Interval:
        """The factor per mantissa bit of the length at which variance is lost."""
        bits = self.settings.bits
        lengths = np.log([self.over_seeds("length", what=SUMS, sizes=(each,)) for each in bits])
        return exponential(mean(np.polyfit(bits, lengths, 1)[0]))

    def mismatch(self, name: str) -> Interval:
        """FP16's mismatch relative to BF16's, a geometric mean."""
        bf16, fp16 = np.transpose([own[name] for own in self.seeded(what=ROLLOUT)])
        return ratio(fp16, bf16)

    def progress(self, low: float, high: float) -> list[float]:
        """The mean progress of steps whose ratio of norms is between bounds, for each seed, at the highest rate; NaN if there are none."""
        found = []
        for own in self.seeded(what=DESCENT, rate=self.settings.rates[-1]):
            both = zip(own["ratio"], own["progress"], strict=True)
            chosen = [progress for ratio, progress in both if low <= ratio < high]
            found.append(float(np.mean(chosen)) if chosen else math.nan)
        return found

    def losses(self, rounds: str) -> Values:
        """The loss of each student."""
        return self.over_seeds("loss", what=STUDENT, rounds=rounds)

    def parts(self) -> list[str | Table | Picture]:
        """The setting, a figure and the tables."""
        chosen = self.settings
        text = self.text("setting", numbers=NUMBERS, ranks=chosen.ranks[-1], fewest=chosen.bits[0], most=chosen.bits[-1])
        return [text, self.picture("ring", self._draw), self._descents(), self._students()]

    def _descents(self) -> Table:
        rows = []
        for rate in self.settings.rates:
            own = self.seeded(what=DESCENT, rate=rate)
            last = max(1, len(own[0]["ratio"]) // 10)
            ratio, progress = (mean([float(np.mean(each[name][-last:])) for each in own]) for name in ("ratio", "progress"))
            rows.append([f"{rate:g}", f"{ratio:.2f}", f"{progress:.3f}"])
        return Table.of("The last tenth of a descent", ["rate", "norm of the gradient ÷ noise", "progress of a step"], rows)

    def _students(self) -> Table:
        rows = [[rounds, f"{geometric(self.losses(rounds)):.4g}"] for rounds in (FULL, PRODUCTS, ALL)]
        return Table.of("Students in MXFP8", ["rounded", "loss at the end"], rows)

    def _draw(self) -> list[Figure]:
        drawn, (left, right) = figures.row(2)
        errors = {
            label: [positive(each) for each in zip(*(own[name] for own in self.seeded(what=RING)), strict=True)]
            for name, label in (("ring", "ring"), ("one_shot", "one sum in FP32"))
        }
        figures.bands(left, self.settings.ranks, errors)
        left.set(xscale="log", yscale="log", xlabel="ranks", ylabel="relative error")
        for bits, look in zip(self.settings.bits, figures.LOOKS, strict=False):
            own = self.seeded(what=SUMS, sizes=(bits,))
            shares = zip(*(each["shares"] for each in own), strict=True)
            figures.band(right, own[0]["lengths"], [mean(each) for each in shares], look, f"{bits} bits")
        right.axhline(LEFT, **figures.REFERENCE())
        right.set(xscale="log", xlabel="products", ylabel="variance ÷ exact")
        figures.legends(drawn, (left, right), columns=2)
        return drawn

    def claims(self) -> list[Claim]:
        """All claims, by source."""
        ring, once, rate = self.power("ring"), self.power("one_shot"), self.settings.rates[-1]
        mismatch, bits = self.mismatch("divergence"), self.mismatch("difference")
        slow, fast = self.progress(1, _THRESHOLD), self.progress(_THRESHOLD, 3)
        fall, stalled = difference(slow, fast), mean(self.progress(0, _THRESHOLD))
        runaway, affine = (ratio(self.losses(ALL), self.losses(rounds)) for rounds in (FULL, PRODUCTS))
        return [
            self.claim("ring", within(ring, 0.5 - _AROUND, 0.5 + _AROUND), power=ring),
            self.claim("one shot", within(once, -_AROUND, _AROUND), power=once),
            *self._of_sums(),
            self.claim("mismatch", below(mismatch, _ELIMINATED), ratio=mismatch),
            self.claim("three bits", within(bits, 0.75 / 8, 1.25 / 8), ratio=bits),
            self.claim("less effective", below(fall), rate=rate, fall=fall),
            self.claim("stall", below(stalled, _HALF), rate=rate, progress=stalled),
            self.claim("diverges", above(runaway, _RUNAWAY), times=runaway),
            self.claim("cure", above(affine, 1.0), times=affine),
        ]

    def _of_sums(self) -> list[Claim]:
        fewest = self.seeded(what=SUMS, sizes=(self.settings.bits[0],))
        variance, times = mean([each["shares"][-1] for each in fewest]), self.times()
        words = {"bits": self.settings.bits[0], "length": fewest[0]["lengths"][-1]}
        return [
            self.claim("variance", below(variance, LEFT), variance=variance, **words),
            self.claim("four times", within(times, 3.5, 4.6), times=times),
        ]

    def meaning(self) -> str:
        """Count the rows that repeat, and give the two clearest numbers."""
        verdicts = [claim.agrees for claim in self.claims()]
        counts = {name: verdicts.count(verdict) for name, verdict in (("yes", True), ("no", False), ("undecided", None))}
        return self.text("meaning", count=len(verdicts), power=self.power("ring").value, times=self.times().value, **counts)
