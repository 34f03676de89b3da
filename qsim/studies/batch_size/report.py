"""The report of the study `batch-size`: curves over the batch size, and the batch that compensates for one bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from qsim import figures
from qsim.studies.batch_size import FULL, IN_RANGE, PLAIN, BatchSize, Run, Settings
from qsim.studies.report import Claim, Picture, Report, Table
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, difference, exponential, mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A loss of accuracy above this counts as failure.
FAILS = 0.05
_SCALES = {PLAIN: "unscaled loss", IN_RANGE: "loss scaled into range"}


class Findings:
    """The results of a study, grouped by format, rounding, batch and loss scale.

    Args:
        study: The study.
        settings: Its settings.
        results: The results of all runs.
    """

    def __init__(self, study: BatchSize, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        self._of = {result.run: result for result in results}
        self.coarse, self.fine = settings.formats[0], settings.formats[-1]
        self.least, self.most = settings.batches[0], settings.batches[-1]
        self.middle = settings.middle

    def report(self) -> Report:
        """The complete report."""
        return Report(
            self.study, [self._setting(), self._accuracies(), *self._pictures(), self._factors()], self._claims(), self._meaning()
        )

    def seeds(self, what: str, format: str, rounding: str, batch: int, scale: str, micro_batches: int = 1) -> list[float]:
        """One value for each seed."""
        chosen = self.settings
        if format == FULL:
            rounding, scale = "nearest", PLAIN
        runs = [
            Run(chosen.data, "", format, rounding, batch, micro_batches, scale, chosen.steps, chosen.rate, seed)
            for seed in range(chosen.seeds)
        ]
        return [float(self._of[run][what]) for run in runs]

    def factor(self, coarse: str, fine: str, scale: str) -> Interval:
        """The factor by which the batch must grow for gradients in the coarser format to vary as little, over seeds."""
        found = [
            result for result in self._of.values() if (result.run.like, result.run.format, result.run.loss_scale) == (fine, coarse, scale)
        ]
        return exponential(mean([math.log(result["factor"]) for result in found]))

    def _setting(self) -> str:
        chosen = self.settings
        return (
            f"Nets for {chosen.data} are trained for {chosen.steps} steps of plain SGD at a learning rate of {chosen.rate:g}, with "
            f"{chosen.seeds} seeds. Only the backward pass rounds: the inputs of each layer and the gradients of its outputs, as in "
            "Figure 3 of the paper; weights, which the paper rounds too, are not rounded. The loss is the mean over a batch, so a "
            "larger batch makes the gradient of each image smaller, until it is below the range of the format. The control multiplies "
            "the loss by 64 times the (micro-)batch's size, or by less if a quarter of the format's largest value is less than 64, and "
            "divides the weights' gradients by the same factor: this changes only the range in which gradients are rounded. Squared "
            "gradients are computed in full precision, over all training images, in the last quarter of the steps. The variance that "
            "one bit less adds is measured on nets that were trained in full precision for a tenth of the steps, in batches of "
            f"{self.middle}. Intervals are 95 %, over seeds."
        )

    def _accuracies(self) -> Table:
        rows = []
        for name in (FULL, *self.settings.formats):
            for rounding in self.settings.roundings if name != FULL else ("-",):
                for scale in _SCALES if name != FULL else (PLAIN,):
                    cells = [f"{mean(self.seeds('accuracy', name, rounding, batch, scale)).value:.1%}" for batch in self.settings.batches]
                    rows.append([name, rounding, _SCALES[scale] if name != FULL else "-", *cells])
        return Table(
            "Accuracy on test images, mean over seeds",
            ["format", "rounding", "loss", *(f"b = {batch}" for batch in self.settings.batches)],
            rows,
        )

    def _pictures(self) -> list[Picture]:
        return [
            Picture(
                "error",
                "Test error against batch size. Bars: 95 % intervals over seeds.",
                lambda: self._curves(self._error, "test error in %"),
            ),
            Picture(
                "gradient",
                "Squared norm of the true gradient at the end of training, relative to full precision with the same seed and batches. "
                "Bars: 95 % intervals over seeds.",
                lambda: self._curves(self._excess, "squared gradient norm\n÷ that of full precision"),
            ),
        ]

    def _curves(self, point: Callable[[str, str, int, str], Interval], label: str) -> Figure:
        figure, axes = figures.panels(1, len(_SCALES), sharey=True)
        batches = self.settings.batches
        seen: list[float] = []
        for panel, (scale, title) in zip(axes, _SCALES.items(), strict=True):
            full = [point(FULL, "nearest", batch, scale).value for batch in batches]
            for place, (name, look) in enumerate(zip(self.settings.formats, figures.LOOKS, strict=False)):
                for rounding in self.settings.roundings:
                    drawn = look if rounding == self.settings.roundings[0] else look.dashed()
                    # Offset slightly, so that bars do not overlap.
                    beside = [batch * 1.06**place for batch in batches]
                    found = [point(name, rounding, batch, scale) for batch in batches]
                    seen += [interval.value for interval in found]
                    figures.band(panel, beside, found, drawn, f"{name.upper()}, {rounding}")
            seen += full
            panel.plot(batches, full, label="full precision", zorder=5, **figures.REFERENCE())
            panel.set_xscale("log", base=2)
            panel.set_xticks(batches, [str(batch) for batch in batches])
            panel.set_xlabel("batch size in images")
            panel.set_title(title)
        axes[0].set_yscale("log")
        # Some intervals are so wide that nothing else would be visible.
        axes[0].set_ylim(min(seen) / 2, max(seen) * 2)
        figures.plain_numbers(axes[0].yaxis)
        axes[0].set_ylabel(label)
        figures.legend(figure, axes[0], columns=len(self.settings.formats) + 1)
        return figure

    def _error(self, format: str, rounding: str, batch: int, scale: str) -> Interval:
        # If a net classifies all images correctly, all that is known is that its error is below one in a thousand.
        wrong = [max(1 - value, 1e-3) for value in self.seeds("accuracy", format, rounding, batch, scale)]
        return exponential(mean(np.log(100 * np.array(wrong)).tolist()), most=100.0)

    def _excess(self, format: str, rounding: str, batch: int, scale: str) -> Interval:
        own, full = (self.seeds("squared_gradient", name, rounding, batch, scale) for name in (format, FULL))
        return exponential(difference(np.log(own).tolist(), np.log(full).tolist()))

    def _factors(self) -> Table:
        rows = [
            [f"{fine} to {coarse}", *(f"{self.factor(coarse, fine, scale):.3f}" for scale in _SCALES)]
            for coarse, fine in pairwise(self.settings.formats)
        ]
        return Table("Factor by which the batch must grow for gradients to vary as little", ["from, to", *_SCALES.values()], rows)

    def _claims(self) -> list[Claim]:
        return [*map(self._grows, _SCALES), self._nearest_fails(), self._by_bias(), self._falls(), *self._bits(), *self._accumulates()]

    def _gain(self, rounding: str, scale: str, format: str = "") -> Interval:
        """The accuracy with the largest batch minus that with the smallest."""
        return difference(*(self.seeds("accuracy", format or self.coarse, rounding, batch, scale) for batch in (self.most, self.least)))

    def _grows(self, scale: str) -> Claim:
        gain = self._gain("stochastic", scale)
        return Claim(
            "Figure 1",
            "stochastic rounding reaches higher accuracy with larger batches",
            f"{_SCALES[scale]}: {self._span} {gain:+.1%} (full precision {self._gain('', scale, FULL):+.1%})",
            True if gain.low > 0 else False if gain.high < 0 else None,
        )

    def _nearest_fails(self) -> Claim:
        gain = self._gain("nearest", PLAIN)
        least = mean(self.seeds("accuracy", self.coarse, "nearest", self.most, PLAIN))
        return Claim(
            "Figures 1 and 5",
            "rounding to nearest does not gain from larger batches, and fails at this precision",
            f"{_SCALES[PLAIN]}: {self._span} {gain:+.1%}, to {least.value:.1%}",
            True if gain.high < 0 else False if gain.low > 0 else None,
        )

    def _by_bias(self) -> Claim:
        ahead = self._ahead_in_range()
        return Claim(
            "Section 3.1",
            "nearest rounding biases gradients, which keeps it from converging "
            f"(here: it is more than {FAILS:.0%} behind with gradients in range as well)",
            f"{_SCALES[IN_RANGE]}: {self.coarse}, {self.most} images, stochastic is {ahead:+.1%} ahead of nearest",
            True if ahead.low > FAILS else False if ahead.high < FAILS else None,
        )

    def _ahead_in_range(self) -> Interval:
        return difference(*(self.seeds("accuracy", self.coarse, rounding, self.most, IN_RANGE) for rounding in ("stochastic", "nearest")))

    def _falls(self) -> Claim:
        found, full = self._slope(self.coarse, "stochastic", IN_RANGE), self._slope(FULL, "", PLAIN)
        return Claim(
            "Figure 5b, Theorem 1",
            "the true gradient at the end is smaller with larger batches under stochastic rounding (here: a power of b below 0)",
            f"{_SCALES[IN_RANGE]}: for {self.coarse} its square scales as b^{found:.2f}; in full precision as b^{full:.2f}",
            True if found.high < 0 else False if found.low > 0 else None,
        )

    @property
    def _span(self) -> str:
        return f"{self.coarse}, from {self.least} to {self.most} images"

    def _slope(self, format: str, rounding: str, scale: str) -> Interval:
        """The power of b with which the squared gradient scales, for each seed."""
        values = np.log([self.seeds("squared_gradient", format, rounding, batch, scale) for batch in self.settings.batches])
        return mean(np.polyfit(np.log(self.settings.batches), values, 1)[0].tolist())

    def _bits(self) -> list[Claim]:
        claims = []
        for coarse, fine in pairwise(self.settings.formats):
            factors = {scale: self.factor(coarse, fine, scale) for scale in _SCALES}
            told = "; ".join(f"{_SCALES[scale]}: {factor:.2f} times" for scale, factor in factors.items())
            # If gradients vary less in fewer bits, they were cut off; that says nothing about rounding.
            below = all(each.high < 4 and each.high >= 1 for each in factors.values())
            above = any(each.low > 4 for each in factors.values())
            agrees = True if below else False if above else None
            here = f"here: {fine} to {coarse}, for gradients that vary as little"
            paper = f"a batch at most 4 times as large compensates for one bit less ({here})"
            claims.append(Claim("Figure 4", paper, told, agrees))
        return claims

    def _accumulates(self) -> list[Claim]:
        parts = self.settings.micro_batches
        if parts == 1:
            return []
        whole, summed = (self.seeds("accuracy", self.coarse, "stochastic", self.most, PLAIN, count) for count in (1, parts))
        ahead = difference(summed, whole)
        claim = Claim(
            "Section 6.1",
            f"gradients accumulated over micro-batches emulate a larger batch (here: accuracies within {FAILS:.0%})",
            f"{_SCALES[PLAIN]}: {self.coarse}, {self.most} images in {parts} parts, {ahead:+.1%} relative to one part",
            True if ahead.low > -FAILS and ahead.high < FAILS else False if ahead.high < -FAILS or ahead.low > FAILS else None,
        )
        return [claim]

    def _meaning(self) -> str:
        plain, in_range = ({how: self._reached(how, scale) for how in ("stochastic", "nearest")} for scale in (PLAIN, IN_RANGE))
        ahead = self._ahead_in_range()
        return (
            f"With the backward pass in {self.coarse.upper()} and {self.most} images per update, stochastic rounding reaches "
            f"{plain['stochastic']:.0%} and nearest {plain['nearest']:.0%}; a loss scale that keeps gradients in range brings them to "
            f"{in_range['stochastic']:.0%} and {in_range['nearest']:.0%}, which leaves a gap of {100 * ahead.value:.1f} points of "
            f"accuracy [{100 * ahead.low:.1f}, {100 * ahead.high:.1f}]."
        )

    def _reached(self, rounding: str, scale: str) -> float:
        """The accuracy of the coarsest format with the largest batch."""
        return mean(self.seeds("accuracy", self.coarse, rounding, self.most, scale)).value
