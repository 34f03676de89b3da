"""The report of the study `batch-size`: the answer, curves over the batch size, and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.batch_size import FULL, IMAGES, PLAIN, SCALES, STEPS
from qsim.studies.batch_size.findings import BatchFindings
from qsim.studies.learners.examples import described, optimized, variant
from qsim.studies.report import Picture, listed
from qsim.studies.statistics import Interval, above, exponential, in_points, mean, proportion
from qsim.text.tables import Table


class Written(BatchFindings):
    """The report."""

    def title(self) -> str:
        """The question, and the model if it is another one."""
        weights = f", weights in {self.settings.weights.upper()}" if self.settings.weights != FULL else ""
        return f"{self.study.question} {variant(self.settings.data, self.settings.model)}{weights}".rstrip()

    def parts(self) -> list[str | Table | Picture]:
        """Curves, the setting and tables."""
        panels = [(design, scale) for design in self.settings.designs for scale in self.settings.scales]
        several = len(self.settings.formats) > 1
        return [
            self.picture("error", lambda: self._curves(panels, self._error, "test error in %", most=100.0)),
            self.picture("gradient", lambda: self._curves(panels, self._excess, "squared gradient norm\n÷ that of full precision")),
            self._setting(),
            *map(self._accuracies, self.settings.designs),
            *([self._factors()] if several else []),
        ]

    def _setting(self) -> str:
        chosen, unit = self.settings, self.unit
        steps = {
            STEPS: f"with {chosen.steps} updates for every batch size",
            IMAGES: f"with {chosen.steps * chosen.middle} {unit} for every batch size, so that a batch twice as large has half as many "
            "updates",
        }
        return self.text(
            "setting",
            learner=described(chosen.data, chosen.model),
            optimizer=optimized(chosen.model),
            weights="not rounded" if chosen.weights == FULL else f"rounded to nearest to {chosen.weights}, in both passes",
            steps=" and ".join(steps[design] for design in chosen.designs),
            looks="at the end" if chosen.looks == 1 else f"{chosen.looks} times in the last quarter of the steps",
            variance=self.text("variance") + " " if len(chosen.formats) > 1 else "",
        )

    def _accuracies(self, design: str) -> Table:
        rows = []
        for name in (FULL, *self.settings.formats):
            for rounding in self.settings.roundings if name != FULL else ("-",):
                for scale in self.settings.scales if name != FULL else (PLAIN,):
                    of_all = [proportion(self.seeds("accuracy", name, rounding, batch, scale, design)) for batch in self.settings.batches]
                    rows.append([name, rounding, SCALES[scale] if name != FULL else "-", *(f"{found:.1%}" for found in of_all)])
        sizes = [f"b = {batch}, {self.settings.updates(design, batch)} steps" for batch in self.settings.batches]
        return Table.of(f"Accuracy on test {self.unit}, {self.equal[design]}", ["format", "rounding", "loss", *sizes], rows)

    def _curves(
        self,
        panels: Sequence[tuple[str, str]],
        point: Callable[[str, str, int, str, str], Interval],
        label: str,
        *,
        most: float = math.inf,
    ) -> list[Figure]:
        drawn, axes = figures.row(len(panels), width=3.9, height=3.0)
        batches = self.settings.batches
        seen: list[float] = []
        for panel, (design, scale) in zip(axes, panels, strict=True):
            for place, (name, look) in enumerate(zip(self.settings.formats, figures.LOOKS, strict=False)):
                for rounding in self.settings.roundings:
                    own = look if rounding == self.settings.roundings[0] else look.dashed()
                    # Offset slightly, so that bars do not overlap.
                    aside = [batch * 1.06**place for batch in batches]
                    found = [point(name, rounding, batch, scale, design) for batch in batches]
                    seen += [interval.value for interval in found]
                    figures.band(panel, aside, found, own, f"{name.upper()}, {rounding}")
            full = [point(FULL, "nearest", batch, scale, design).value for batch in batches]
            seen += full
            panel.plot(batches, full, label="full precision", zorder=5, **figures.REFERENCE())
            figures.doubling_axis(panel, batches)
            panel.set(xlabel=f"batch size in {self.unit}", ylabel=label, title=self.how(design, scale))
        for panel in axes:
            panel.set_yscale("log")
            # Some intervals are so wide that nothing else would be visible.
            panel.set_ylim(min(seen) / 1.5, min(max(seen) * 1.5, most))
            figures.plain_numbers(panel.yaxis)
            figures.label_ends(panel)
        return drawn

    def _error(self, format: str, rounding: str, batch: int, scale: str, design: str) -> Interval:
        return proportion(1 - self.seeds("accuracy", format, rounding, batch, scale, design)) * 100

    def _excess(self, format: str, rounding: str, batch: int, scale: str, design: str) -> Interval:
        return exponential(mean(self.excess(format, rounding, batch, scale, design)))

    def _factors(self) -> Table:
        rows = [
            [f"{fine} to {coarse}", *(f"{self.factor(coarse, fine, scale):.3f}" for scale in self.settings.scales)]
            for coarse, fine in pairwise(self.settings.formats)
        ]
        return Table.of(
            "Factor by which the batch must grow for gradients to vary as little",
            ["from, to", *(SCALES[scale] for scale in self.settings.scales)],
            rows,
        )

    def meaning(self) -> str:
        """The noise that a larger batch buys back, and the accuracy."""
        names, noise = [name.upper() for name in self.settings.formats], ""
        if len(names) > 1:
            factor = self.factor(self.coarse, self.settings.formats[1], self.settings.scales[-1])
            noise = self.text("noise", factor=factor, name=names[0], finer=names[1]) + " "
        beyond = {design: self.beyond("stochastic", self.settings.scales[-1], design) for design in self.settings.designs}
        accuracies = {
            key: mean(self.seeds("accuracy", which, how, self.most, self.settings.scales[0])).value
            for key, which, how in (
                ("nearest", self.coarse, "nearest"), ("stochastic", self.coarse, "stochastic"), ("full", FULL, "nearest")
            )
        }  # fmt: skip
        return self.text(
            "meaning",
            noise=noise,
            pushed=self.text("pushed") if PLAIN in self.settings.scales else "If gradients are in range:",
            name=names[0],
            gains=listed([f"{in_points(gain)} points with {self.equal[design]}" for design, gain in beyond.items()]),
            shown=": no difference shows" if all(above(gain) is None for gain in beyond.values()) else "",
            **accuracies,
        )
