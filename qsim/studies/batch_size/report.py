"""The report of the study `batch-size`: the answer, curves over the batch size, and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from qsim.plot import figures
from qsim.studies.batch_size import FULL, IMAGES, IN_RANGE, PLAIN, STEPS, BatchSizeStudy
from qsim.studies.batch_size.claims import claims
from qsim.studies.batch_size.findings import SCALES, Findings
from qsim.studies.learners.examples import described, optimized, variant
from qsim.studies.report import Picture, Report, listed
from qsim.studies.statistics import Interval, above, confidence_text, describe_bars, exponential, in_points, mean, proportion
from qsim.text.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ReportWriter:
    """Write the report.

    Args:
        study: The study.
        found: The findings from its runs.
    """

    def __init__(self, study: BatchSizeStudy, found: Findings) -> None:
        self._study, self._found, self._settings = study, found, found.settings

    def report(self) -> Report:
        """The complete report."""
        parts: list[str | Table | Picture] = [
            *self._pictures(),
            self._setting(),
            *map(self._accuracies, self._settings.designs),
            *([self._factors()] if len(self._settings.formats) > 1 else []),
        ]
        chosen = self._settings
        title = f"{self._study.question} {variant(chosen.data, chosen.model)}".rstrip()
        return Report(self._study, parts, claims(self._found), self._meaning(), title)

    def _setting(self) -> str:
        chosen, unit = self._settings, self._found.unit
        steps = {
            STEPS: f"with {chosen.steps} updates for every batch size",
            IMAGES: f"with {chosen.steps * chosen.middle} {unit} for every batch size, so that a batch twice as large has half as many "
            "updates",
        }
        variance = (
            "The variance that one bit less adds is measured on nets that were trained in full precision for a tenth of the steps, in "
            f"batches of {self._found.middle}. "
        ) * (len(chosen.formats) > 1)
        looks = "at the end" if chosen.looks == 1 else f"{chosen.looks} times in the last quarter of the steps"
        return (
            f"{described(chosen.data, chosen.model)}. {optimized(chosen.model)} at a constant learning rate of {chosen.rate:g}, "
            f"{chosen.seeds} seeds, {' and '.join(steps[design] for design in chosen.designs)}. The paper has equal steps, where larger "
            f"batches see more {unit} and full precision gains as well: what rounding adds to that is a difference of differences. The "
            f"learning rate is the same for all batch sizes and was not tuned; with equal {unit}, larger batches have fewer updates and "
            "learn less, in full precision as well. Only the backward pass rounds: the inputs of each layer and the gradients of its "
            "outputs, which are what the paper's experiments round (Appendix E). Its Figure 3 also rounds the weights; here they are not "
            f"rounded. The loss is the mean over a batch, so a larger batch makes the gradient of each {unit[:-1]} smaller, until it is "
            "below the range of the format. The "
            "control multiplies the loss by 64 times the number of predictions in a batch, or by less if a quarter of the format's "
            "largest value is less than 64, and divides the weights' gradients by the same factor: this changes only the range in "
            f"which gradients are rounded. Squared gradients are computed in full precision, over all training {unit}, {looks}. "
            f"{variance}Theorem 1 is not graded: it bounds an average over all steps from above, and no measured "
            f"norm contradicts such a bound whose constants are unknown. Intervals are {confidence_text()}, over seeds."
        )

    def _accuracies(self, design: str) -> Table:
        rows = []
        for name in (FULL, *self._settings.formats):
            for rounding in self._settings.roundings if name != FULL else ("-",):
                for scale in SCALES if name != FULL else (PLAIN,):
                    of_all = [
                        proportion(self._found.seeds("accuracy", name, rounding, batch, scale, design)) for batch in self._settings.batches
                    ]
                    rows.append([name, rounding, SCALES[scale] if name != FULL else "-", *(f"{found:.1%}" for found in of_all)])
        sizes = [f"b = {batch}, {self._settings.updates(design, batch)} steps" for batch in self._settings.batches]
        return Table.of(f"Accuracy on test {self._found.unit}, {self._found.equal[design]}", ["format", "rounding", "loss", *sizes], rows)

    def _pictures(self) -> list[Picture]:
        panels = [(design, scale) for design in self._settings.designs for scale in SCALES]
        return [
            Picture(
                "error",
                f"Test error against batch size. {describe_bars()}",
                lambda: self._curves(panels, self._error, "test error in %", most=100.0),
            ),
            Picture(
                "gradient",
                "Squared norm of the true gradient at the end of training, relative to full precision with the same seed and batches. "
                f"{describe_bars()}",
                lambda: self._curves(panels, self._excess, "squared gradient norm\n÷ that of full precision"),
            ),
        ]

    def _curves(
        self,
        panels: Sequence[tuple[str, str]],
        point: Callable[[str, str, int, str, str], Interval],
        label: str,
        *,
        most: float = math.inf,
    ) -> list[Figure]:
        drawn, axes = figures.row(len(panels), width=3.9, height=3.0)
        batches = self._settings.batches
        seen: list[float] = []
        for panel, (design, scale) in zip(axes, panels, strict=True):
            for place, (name, look) in enumerate(zip(self._settings.formats, figures.LOOKS, strict=False)):
                for rounding in self._settings.roundings:
                    own = look if rounding == self._settings.roundings[0] else look.dashed()
                    # Offset slightly, so that bars do not overlap.
                    aside = [batch * 1.06**place for batch in batches]
                    found = [point(name, rounding, batch, scale, design) for batch in batches]
                    seen += [interval.value for interval in found]
                    figures.band(panel, aside, found, own, f"{name.upper()}, {rounding}")
            full = [point(FULL, "nearest", batch, scale, design).value for batch in batches]
            seen += full
            panel.plot(batches, full, label="full precision", zorder=5, **figures.REFERENCE())
            panel.set_xscale("log", base=2)
            panel.set_xticks(batches, [str(batch) for batch in batches])
            panel.minorticks_off()
            panel.set_xlabel(f"batch size in {self._found.unit}")
            panel.set_ylabel(label)
            panel.set_title(f"{self._found.equal[design]}, {SCALES[scale]}")
        for panel in axes:
            panel.set_yscale("log")
            # Some intervals are so wide that nothing else would be visible.
            panel.set_ylim(min(seen) / 1.5, min(max(seen) * 1.5, most))
            figures.plain_numbers(panel.yaxis)
            figures.label_ends(panel)
        return drawn

    def _error(self, format: str, rounding: str, batch: int, scale: str, design: str) -> Interval:
        return proportion([1 - value for value in self._found.seeds("accuracy", format, rounding, batch, scale, design)]) * 100

    def _excess(self, format: str, rounding: str, batch: int, scale: str, design: str) -> Interval:
        return exponential(mean(self._found.excess(format, rounding, batch, scale, design)))

    def _factors(self) -> Table:
        rows = [
            [f"{fine} to {coarse}", *(f"{self._found.factor(coarse, fine, scale):.3f}" for scale in SCALES)]
            for coarse, fine in pairwise(self._settings.formats)
        ]
        return Table.of("Factor by which the batch must grow for gradients to vary as little", ["from, to", *SCALES.values()], rows)

    def _meaning(self) -> str:
        found, name, noise = self._found, self._found.coarse.upper(), ""
        if len(self._settings.formats) > 1:
            finer = self._settings.formats[1]
            factor = found.factor(found.coarse, finer, IN_RANGE)
            noise = (
                f"It buys back noise: with a batch {factor.value:.2f} times as large [{factor.low:.2f}, {factor.high:.2f}], gradients in "
                f"{name} vary as little as those in {finer.upper()}, if they are in the range of the format. "
            )
        beyond = {design: found.beyond("stochastic", IN_RANGE, design) for design in self._settings.designs}
        gains = listed([f"{in_points(gain)} points with {found.equal[design]}" for design, gain in beyond.items()])
        shown = ": no difference shows" if all(above(gain) is None for gain in beyond.values()) else ""
        nearest, stochastic, full = (
            mean(found.seeds("accuracy", which, how, found.most, PLAIN)).value
            for which, how in ((found.coarse, "nearest"), (found.coarse, "stochastic"), (FULL, "nearest"))
        )
        return (
            f"{noise}Relative to full precision, accuracy in {name} changes from {found.least} to {found.most} {found.unit} by "
            f"{gains}{shown}. If the loss is not scaled, a larger batch pushes gradients below the range: with {found.most} {found.unit}, "
            "accuracy is "
            f"{stochastic:.0%} with stochastic rounding and {nearest:.0%} with round-to-nearest, and {full:.0%} in full precision."
        )
