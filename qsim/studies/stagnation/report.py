"""The report of the study `stagnation`: how close weights come to the optimum, compared with the limit of Theorem 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from qsim.plot import figures
from qsim.studies.report import Picture, Report
from qsim.studies.stagnation import StagnationStudy
from qsim.studies.stagnation.bounds import Array
from qsim.studies.stagnation.claims import claims
from qsim.studies.stagnation.findings import Findings, geometric
from qsim.studies.stagnation.least_squares import COMPUTE, METHODS, NEAREST
from qsim.studies.statistics import confidence_text, describe_bars
from qsim.text.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Where curves that reach zero end on a logarithmic axis.
_FLOOR = 1e-5


class ReportWriter:
    """Write the report.

    Args:
        study: The study.
        found: The findings from its runs.
    """

    def __init__(self, study: StagnationStudy, found: Findings) -> None:
        self._study, self._found, self._settings = study, found, found.settings
        self._shown = found.settings.rates[-1]

    def report(self) -> Report:
        """The complete report."""
        return Report(self._study, [self._setting(), self._table(), *self._pictures()], claims(self._found), self._meaning())

    def _setting(self) -> str:
        chosen = self._settings
        return (
            f"{chosen.problems * chosen.seeds} least-squares problems in {chosen.dimensions} dimensions: {chosen.samples} samples of "
            "normal data, optimal weights uniform in [0, 100), descent from zero. The gradient is computed from all samples, or from "
            f"one as in Figure 2 of the paper. Rounding is to {chosen.format}. Without noise in the labels the optimum is rounded too: "
            "assumption A1, that the model fits every sample, holds for weights in a format only if it contains the best ones. "
            "Distances are not squared, and are in units of Theorem 1's published bound, problem by problem. With the gradient of one "
            "sample, L is the largest of all samples', and the bound is so small that it is below the distance between the format's "
            "levels; with the gradient of all samples it is above. The page Derivations of qsim's site shows which steps of Theorem 1's "
            f"proof do not hold, and derives the bound that does. Intervals are {confidence_text()}, over problems."
        )

    def _table(self) -> Table:
        ways = [("all samples", f"{rate:g}", [self._found.whole(method, rate) for method in METHODS]) for rate in self._settings.rates]
        ways.append(("one sample", f"{self._settings.sample_rate:g}", [self._found.single(method) for method in METHODS]))
        rows = [[of, rate, *(_spread(curves.final / curves.printed) for curves in found)] for of, rate, found in ways]
        title = "Distance at the end in units of Theorem 1's bound: median (range) over problems"
        return Table.of(title, ["gradient of", "rate", *METHODS], rows)

    def _pictures(self) -> list[Picture]:
        return [
            Picture(
                "distance",
                "Distance from the optimum in units of Theorem 1's bound; medians, and the middle 90 % of problems. "
                f"Values below {_FLOOR:g} are not drawn.",
                self._distances,
            ),
            Picture(
                "rate",
                f"Where rounding to nearest stops, with the gradient of all samples; geometric means. {describe_bars('problems')}",
                self._rates,
            ),
            Picture(
                "loss",
                "Figure 2: training loss with noise in the labels, one sample per step; means over problems and steps.",
                self._losses,
            ),
        ]

    def _distances(self) -> list[Figure]:
        drawn, axes = figures.row(2)
        titles = f"all samples, rate {self._shown:g}", f"one sample, rate {self._settings.sample_rate:g}"
        sides = [
            {method: self._found.whole(method, self._shown) for method in METHODS},
            {method: self._found.single(method) for method in METHODS},
        ]
        for panel, side, title in zip(axes, sides, titles, strict=True):
            for place, (method, look) in enumerate(zip(METHODS, figures.LOOKS, strict=False)):
                curves = side[method]
                low, middle, high = np.quantile(curves.distances / curves.printed, [0.05, 0.5, 0.95], axis=1)
                shown = np.where(middle > _FLOOR, middle, np.nan)
                panel.plot(curves.steps, shown, label=method, **_drawn(look, method, place))
                panel.fill_between(curves.steps, np.maximum(low, _FLOOR), np.maximum(high, _FLOOR), where=middle > _FLOOR,
                                   color=look.color, alpha=0.15, linewidth=0)  # fmt: skip
            panel.axhline(1, label="Theorem 1's bound", **figures.REFERENCE())
            panel.set_yscale("log")
            panel.set_xlabel("step")
            panel.set_title(title)
            panel.set_ylabel("distance / Theorem 1's bound")
        figures.share_y(axes)
        for panel in axes:
            figures.label_ends(panel)
        return drawn

    def _rates(self) -> Figure:
        (figure,), (panel,) = figures.row(1, width=3.9, height=2.9)
        rates = self._settings.rates
        found = [self._found.whole(NEAREST, rate) for rate in rates]
        figures.band(panel, rates, [geometric(curves.final) for curves in found], figures.LOOKS[1], "nearest")
        printed, holding = ([geometric(getattr(curves, name)).value for curves in found] for name in ("printed", "holding"))
        panel.plot(rates, printed, label="Theorem 1's bound", **figures.REFERENCE())
        panel.plot(rates, holding, label="bound, corrected proof", **figures.REFERENCE(linestyle=(0, (5, 2))))
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.minorticks_off()
        figures.plain_numbers(panel.yaxis)
        panel.set_xlabel("learning rate")
        panel.set_ylabel("distance at the end")
        figures.legend(figure, panel, columns=2)
        return figure

    def _losses(self) -> Figure:
        (figure,), (panel,) = figures.row(1, width=3.9, height=2.9)
        for place, (method, look) in enumerate(zip(METHODS, figures.LOOKS, strict=False)):
            curves = self._found.single(method, self._settings.noise)
            panel.plot(curves.steps, curves.losses.mean(1), label=method, **_drawn(look, method, place))
        panel.set_yscale("log")
        panel.set_xlabel("step")
        panel.set_ylabel("training loss")
        figures.label_ends(panel)
        return figure

    def _meaning(self) -> str:
        nearest = self._found.whole(NEAREST, self._shown)
        others = [self._found.whole(method, self._shown) for method in METHODS if method != NEAREST]
        farthest = max(float((curves.final / curves.printed).max()) for curves in others)
        return (
            f"Rounding weights to nearest stops gradient descent: in {self._settings.format.upper()} at a learning rate of "
            f"{self._shown:g}, after a median of {1 - np.median(nearest.final / nearest.start):.0%} of the way to the optimum. Stochastic "
            "and Kahan updates go on, and so does descent with everything rounded except the weights: with gradients of all samples, these "
            f"end closer to the optimum than {farthest:.0e} times the distance at which Theorem 1 says that nearest stops."
        )


def _spread(values: Array) -> str:
    low, middle, high = (f"{value:.2g}" for value in np.quantile(values, [0, 0.5, 1]))
    return f"{middle} ({low} to {high})" if low != high else middle


def _drawn(look: figures.Look, method: str, place: int) -> dict[str, Any]:
    """The style of a curve that others cover: markers alternate, and dashes show the one without rounding."""
    return (look.dashed() if method == COMPUTE else look)(markevery=(2 * place, 10))
