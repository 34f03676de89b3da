"""The report of the study `cancelled-updates`: shares of updates over time, and accuracy against memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import qsim
from qsim import figures
from qsim.studies.cancelled_updates import FULL, KAHAN, NEAREST, STOCHASTIC, UPDATES, CancelledUpdates, Run, Settings, made
from qsim.studies.report import Claim, Picture, Report, Table
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, difference, exponential, mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Accuracies that differ by at most this count as the same.
_SAME = 0.01


class Findings:
    """The results of a study, grouped by format, update and layers."""

    def __init__(self, study: CancelledUpdates, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        self._of = {result.run: result for result in results}
        self.coarse = settings.formats[-1]
        self.layers = 1 + max(run.kahan_layers for run in self._of)

    def report(self) -> Report:
        """The complete report."""
        return Report(self.study, [self._setting(), *self._tables(), *self._pictures()], self._claims(), self._meaning())

    def seeds(self, format: str, update: str, kahan_layers: int = 0) -> list[Result[Run]]:
        """The results of each seed."""
        if kahan_layers == self.layers:
            update, kahan_layers = KAHAN, 0
        return [self._of[made(self.settings, format, update, kahan_layers, seed)] for seed in range(self.settings.seeds)]

    def values(self, what: str, format: str, update: str, kahan_layers: int = 0) -> list[float]:
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

    def _setting(self) -> str:
        chosen = self.settings
        carriers = ", ".join(f"{name} ({qsim.format(name).bits} bits)" for name in chosen.formats)
        return (
            f"Nets for {chosen.data} are trained for {chosen.steps} steps of SGD with momentum {chosen.momentum:g} and {chosen.batch} "
            f"images per step; the learning rate decays linearly from {chosen.rate:g} to zero; there are {chosen.seeds} seeds. Weights "
            f"are values of a format: {carriers}. Everything else, including what Kahan summation stores, is in the 16-bit dtype that "
            "holds it, and PyTorch's own operators compute. An update counts if it is not zero, and is cancelled if it leaves the "
            "weight unchanged. The part of it that Kahan summation stores is carried. In the mixed nets, the last layers have Kahan "
            "updates; memory is that of weights and of what Kahan summation stores. Our source for Appendix D.3 lists what it measures, "
            "without its numbers; of that list, stochastic rounding combined with Kahan summation of the same weight is left out. "
            "Intervals are 95 %, over seeds."
        )

    def _tables(self) -> list[Table]:
        rows = [
            [name, update, f"{mean(self._quarter(name, update, 0)):.1%}", f"{mean(self._quarter(name, update, -1)):.1%}",
             f"{float(self.shares(name, update, lost=True).mean()):.1%}", f"{mean(self.values('accuracy', name, update)):.1%}",
             f"{mean(self.values('loss', name, update)):.2g}"]
            for name in (FULL, *self.settings.formats) for update in (UPDATES if name != FULL else (NEAREST,))
        ]  # fmt: skip
        header = ["weights", "update", "cancelled, first quarter", "last quarter", "lost, overall", "test accuracy", "training loss"]
        mixed = [
            [str(count), f"{self._memory(count):.2f}", f"{mean(self.values('accuracy', self.settings.mixed, STOCHASTIC, count)):.2%}",
             f"{mean(self.values('loss', self.settings.mixed, STOCHASTIC, count)):.2g}"]
            for count in range(self.layers + 1)
        ]  # fmt: skip
        return [
            Table("Cancelled updates", header, rows),
            Table(
                f"Mixtures of stochastic and Kahan updates, {self.settings.mixed}",
                ["layers with Kahan updates", "bytes per weight", "test accuracy", "training loss"],
                mixed,
            ),
        ]

    def _memory(self, kahan_layers: int) -> float:
        return self.values("memory", self.settings.mixed, STOCHASTIC, kahan_layers)[0]

    def _quarter(self, format: str, update: str, which: int) -> list[float]:
        """The share in the first or the last quarter of training, for each seed."""
        return [float(part.mean()) for part in np.array_split(self.shares(format, update), 4, axis=1)[which]]

    def _pictures(self) -> list[Picture]:
        return [
            Picture(
                "shares",
                "Share of updates that are cancelled. Dashed: cancelled and not carried. Bands: range over seeds.",
                self._over_time,
            ),
            Picture(
                "accuracy", "Test error and training loss by the format of the weights. Bars: 95 % intervals over seeds.", self._by_format
            ),
            Picture(
                "memory", "Figure 5: layer by layer from stochastic to Kahan updates. Bars: 95 % intervals over seeds.", self._frontier
            ),
        ]

    def _over_time(self) -> Figure:
        figure, axes = figures.panels(1, len(UPDATES), width=2.6, sharey=True)
        steps = self.steps()
        for panel, update in zip(axes, UPDATES, strict=True):
            for name, look in zip(self.settings.formats, figures.LOOKS, strict=False):
                shares = 100 * self.shares(name, update)
                panel.plot(steps, shares.mean(0), label=name.upper(), markevery=5, **look())
                panel.fill_between(steps, shares.min(0), shares.max(0), color=look.color, alpha=0.18, linewidth=0)
                if update == KAHAN:
                    panel.plot(steps, 100 * self.shares(name, update, lost=True).mean(0), **figures.Look(look.color, "").dashed()())
            panel.set_title(update)
            panel.set_xlabel("step")
            panel.set_ylim(0, 103)
        axes[0].set_ylabel("cancelled in % of updates")
        figures.legend(figure, axes[0], columns=len(self.settings.formats))
        return figure

    def _by_format(self) -> Figure:
        figure, (left, right) = figures.panels(1, 2)
        place = np.arange(len(self.settings.formats))
        for shift, (update, look) in enumerate(zip(UPDATES, figures.LOOKS, strict=False)):
            beside = place + 0.08 * (shift - 1)
            wrong = [mean([100 * (1 - value) for value in self.values("accuracy", name, update)]) for name in self.settings.formats]
            figures.band(left, beside, wrong, look, update)
            figures.band(right, beside, [self._loss(name, update) for name in self.settings.formats], look, update)
        left.axhline(100 * (1 - mean(self.values("accuracy", FULL, NEAREST)).value), label=FULL, **figures.REFERENCE())
        right.axhline(self._loss(FULL, NEAREST).value, **figures.REFERENCE())
        for panel, label in ((left, "test error in %"), (right, "training loss")):
            panel.set_xticks(place, [name.upper() for name in self.settings.formats])
            panel.set_xlabel("format of the weights")
            panel.set_ylabel(label)
        right.set_yscale("log")
        figures.legend(figure, left, columns=len(UPDATES) + 1)
        return figure

    def _loss(self, format: str, update: str, kahan_layers: int = 0) -> Interval:
        return exponential(mean(np.log(self.values("loss", format, update, kahan_layers)).tolist()), most=10.0)

    def _frontier(self) -> Figure:
        figure, (left, right) = figures.panels(1, 2)
        name, counts = self.settings.mixed, range(self.layers + 1)
        memory = [self._memory(count) for count in counts]
        right_of = [mean([100 * value for value in self.values("accuracy", name, STOCHASTIC, count)]) for count in counts]
        losses = [self._loss(name, STOCHASTIC, count) for count in counts]
        references = ((FULL, figures.REFERENCE()), (name, figures.REFERENCE(linestyle=(0, (5, 2)))))
        for panel, found, label in ((left, right_of, "test accuracy in %"), (right, losses, "training loss")):
            figures.band(panel, memory, found, figures.LOOKS[0], f"{name}, stochastic to Kahan")
            for own, look in references:
                accuracy = 100 * mean(self.values("accuracy", own, NEAREST)).value
                level = accuracy if panel is left else self._loss(own, NEAREST).value
                panel.axhline(level, label=FULL if own == FULL else f"{own}, nearest", **look)
            panel.set_xlabel("memory in bytes per weight")
            panel.set_ylabel(label)
        right.set_yscale("log")
        figures.legend(figure, left, columns=3)
        return figure

    def _claims(self) -> list[Claim]:
        return [
            self._grows(),
            self._more(),
            self._carried(),
            *map(self._matches, (STOCHASTIC, KAHAN)),
            *self._nearest(),
            self._memory_pays(),
        ]

    def _grows(self) -> Claim:
        name = self.settings.mixed
        gain = difference(self._quarter(name, NEAREST, -1), self._quarter(name, NEAREST, 0))
        return Claim(
            "Section 3.1",
            "nearest rounding cancels updates mostly late in training",
            f"{name}: {gain:+.1%} from the first to the last quarter, to {mean(self._quarter(name, NEAREST, -1)).value:.1%}",
            True if gain.low > 0 else False if gain.high < 0 else None,
        )

    def _more(self) -> Claim:
        found = [float(self.shares(name, NEAREST).mean()) for name in self.settings.formats]
        return Claim(
            "Theorem 1",
            "the coarser the format, the more updates are cancelled",
            "; ".join(f"{name} {share:.1%}" for name, share in zip(self.settings.formats, found, strict=True)),
            all(fine < coarse for fine, coarse in pairwise(found)),
        )

    def _carried(self) -> Claim:
        name = self.settings.mixed
        lost = {update: self.shares(name, update, lost=True).mean(1).tolist() for update in (NEAREST, KAHAN)}
        return Claim(
            "Section 3.2",
            "Kahan summation accumulates cancelled updates until they are large enough",
            f"{name}: {mean(lost[KAHAN]):.1%} of updates are lost, with nearest {mean(lost[NEAREST]):.1%}; those lost are too small for "
            "the 16 bits of the compensation",
            _sign(difference(lost[NEAREST], lost[KAHAN])),
        )

    def _matches(self, update: str) -> Claim:
        name = self.settings.mixed
        ahead = difference(self.values("accuracy", name, update), self.values("accuracy", FULL, NEAREST))
        return Claim(
            "Section 4, Table 4",
            f"{name} with {update} updates matches 32-bit training",
            f"accuracy {ahead:+.2%} relative to {FULL}; up to {_SAME:.0%} below counts as a match",
            True if ahead.low > -_SAME else False if ahead.high < -_SAME else None,
        )

    def _nearest(self) -> list[Claim]:
        claims = []
        for name in dict.fromkeys((self.settings.mixed, self.coarse)):
            where = "" if name == self.settings.mixed else ", in fewer bits"
            ahead = difference(self.values("accuracy", FULL, NEAREST), self.values("accuracy", name, NEAREST))
            losses = difference(*(np.log(self.values("loss", *which)).tolist() for which in ((name, NEAREST), (FULL, NEAREST))))
            claims += [
                Claim(
                    f"Section 4, Table 3{where}",
                    "nearest rounding of updates loses accuracy: 1.2 to 6.7 % in bf16",
                    f"{name}: accuracy lost relative to {FULL}: {ahead:+.2%}",
                    _sign(ahead),
                ),
                Claim(
                    f"Section 4, Figure 3{where}",
                    "nearest rounding of updates falls behind 32-bit training on the training data",
                    f"{name}: training loss {exponential(losses):.3g} times as high",
                    _sign(losses),
                ),
            ]
        return claims

    def _memory_pays(self) -> Claim:
        name = self.settings.mixed
        ahead = difference(self.values("accuracy", name, KAHAN), self.values("accuracy", name, STOCHASTIC))
        return Claim(
            "Figure 5",
            "with up to twice the memory of weights, Kahan updates instead of stochastic ones gain up to 0.04 %",
            f"{name}: {ahead:+.2%} for {self._memory(self.layers) / self._memory(0):.2f} times the memory",
            _sign(ahead),
        )

    def _meaning(self) -> str:
        name = self.settings.mixed
        fine, coarse = (float(self.shares(which, NEAREST).mean()) for which in (name, self.coarse))
        nearest, stochastic, kahan = (mean(self.values("accuracy", self.coarse, update)).value for update in UPDATES)
        full = mean(self.values("accuracy", FULL, NEAREST)).value
        return (
            f"Rounding to nearest cancels {fine:.0%} of the updates of {name} weights and {coarse:.0%} in {self.coarse}, where test "
            f"accuracy falls to {nearest:.1%}; stochastic and Kahan updates reach {stochastic:.1%} and {kahan:.1%}, full precision "
            f"{full:.1%}."
        )


def _sign(found: Interval) -> bool | None:
    """Whether a difference is above zero; None if its interval contains zero."""
    return None if math.isnan(found.value) or found.low <= 0 <= found.high else found.low > 0
