"""The report of the study `stagnation`: how close weights come to the optimum, compared with the limit of Theorem 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.report import Picture
from qsim.studies.stagnation.findings import Array, DescentFindings
from qsim.studies.stagnation.least_squares import COMPUTE, METHODS, NEAREST
from qsim.studies.statistics import geometric
from qsim.text.tables import Table


class Written(DescentFindings):
    """The report.

    Attributes:
        floor: Where curves that reach zero end on a logarithmic axis.
    """

    floor = 1e-5

    def parts(self) -> list[str | Table | Picture]:
        """The setting, the table and figures."""
        text = self.text("setting", count=self.settings.problems * self.settings.seeds)
        rates, losses = self.picture("rate", self._rates), self.picture("loss", self._losses)
        return [text, self._table(), self.picture("distance", self._distances), rates, losses]

    def _table(self) -> Table:
        ways = [("all samples", f"{rate:g}", [self.whole(method, rate) for method in METHODS]) for rate in self.settings.rates]
        ways.append(("one sample", f"{self.settings.sample_rate:g}", [self.single(method) for method in METHODS]))
        rows = [[of, rate, *(_spread(curves.final / curves.printed) for curves in found)] for of, rate, found in ways]
        title = "Distance at the end in units of Theorem 1's bound: median (range) over problems"
        return Table.of(title, ["gradient of", "rate", *METHODS], rows)

    def _distances(self) -> list[Figure]:
        drawn, axes = figures.row(2)
        titles = f"all samples, rate {self.settings.rates[-1]:g}", f"one sample, rate {self.settings.sample_rate:g}"
        sides = [
            {method: self.whole(method, self.settings.rates[-1]) for method in METHODS},
            {method: self.single(method) for method in METHODS},
        ]
        for panel, side, title in zip(axes, sides, titles, strict=True):
            for place, (method, look) in enumerate(zip(METHODS, figures.LOOKS, strict=False)):
                curves = side[method]
                low, middle, high = np.quantile(curves.distances / curves.printed, [0.05, 0.5, 0.95], axis=1)
                shown = np.where(middle > self.floor, middle, np.nan)
                panel.plot(curves.steps, shown, label=method, **_drawn(look, method, place))
                panel.fill_between(curves.steps, np.maximum(low, self.floor), np.maximum(high, self.floor), where=middle > self.floor,
                                   color=look.color, alpha=0.15, linewidth=0)  # fmt: skip
            panel.axhline(1, label="Theorem 1's bound", **figures.REFERENCE())
            panel.set(yscale="log", xlabel="step", title=title, ylabel="distance / Theorem 1's bound")
        figures.share_y(axes)
        for panel in axes:
            figures.label_ends(panel)
        return drawn

    def _rates(self) -> Figure:
        (figure,), (panel,) = figures.row(1, width=3.9, height=2.9)
        rates = self.settings.rates
        found = [self.whole(NEAREST, rate) for rate in rates]
        figures.band(panel, rates, [geometric(curves.final) for curves in found], figures.LOOKS[1], "nearest")
        printed, holding = ([geometric(getattr(curves, name)).value for curves in found] for name in ("printed", "holding"))
        panel.plot(rates, printed, label="Theorem 1's bound", **figures.REFERENCE())
        panel.plot(rates, holding, label="bound, corrected proof", **figures.REFERENCE(linestyle=(0, (5, 2))))
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.minorticks_off()
        figures.plain_numbers(panel.yaxis)
        panel.set(xlabel="learning rate", ylabel="distance at the end")
        figures.legend(figure, panel, columns=2)
        return figure

    def _losses(self) -> Figure:
        (figure,), (panel,) = figures.row(1, width=3.9, height=2.9)
        for place, (method, look) in enumerate(zip(METHODS, figures.LOOKS, strict=False)):
            curves = self.single(method, self.settings.noise)
            panel.plot(curves.steps, curves.losses.mean(1), label=method, **_drawn(look, method, place))
        panel.set(yscale="log", xlabel="step", ylabel="training loss")
        figures.label_ends(panel)
        return figure

    def meaning(self) -> str:
        """Where nearest stops, and how close the others come."""
        rate = self.settings.rates[-1]
        nearest = self.whole(NEAREST, rate)
        others = [self.whole(method, rate) for method in METHODS if method != NEAREST]
        farthest = max(float((curves.final / curves.printed).max()) for curves in others)
        median = 1 - np.median(nearest.final / nearest.start)
        return self.text("meaning", format=self.settings.format.upper(), rate=rate, median=median, farthest=farthest)


def _spread(values: Array) -> str:
    low, middle, high = (f"{value:.2g}" for value in np.quantile(values, [0, 0.5, 1]))
    return f"{middle} ({low} to {high})" if low != high else middle


def _drawn(look: figures.Look, method: str, place: int) -> dict[str, Any]:
    """The style of a curve that others cover: markers alternate, and dashes show the one without rounding."""
    return (look.dashed() if method == COMPUTE else look)(markevery=(2 * place, 10))
