"""The report of the study `stagnation`: how close weights come to the optimum, compared with the limit of Theorem 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import qsim
from qsim import figures
from qsim.studies.report import Claim, Picture, Report, Table
from qsim.studies.result import Result
from qsim.studies.stagnation import Run, Settings, Stagnation, single, whole
from qsim.studies.stagnation.bounds import Array, Curves
from qsim.studies.stagnation.least_squares import COMPUTE, EXACT, KAHAN, METHODS, NEAREST, STOCHASTIC
from qsim.studies.statistics import Interval, exponential, mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BELOW = 100
_NAMES = {
    EXACT: "without rounding",
    COMPUTE: "with nearest rounding only in the forward and backward passes",
    STOCHASTIC: "with stochastic updates",
    KAHAN: "with Kahan updates",
}
_WHERE = {EXACT: "Section 3.1", COMPUTE: "Section 3.1", STOCHASTIC: "Section 3.2", KAHAN: "Section 3.2"}
#: Where curves that reach zero end on a logarithmic axis.
_FLOOR = 1e-5


class Findings:
    """The results of a study, grouped by method."""

    def __init__(self, study: Stagnation, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        self._of = {result.run: result for result in results}
        # The epsilon of formats is the distance between 1 and the next number; the rounding error is at most half of it.
        self._epsilon = qsim.format(settings.format).epsilon / 2
        self._shown = settings.rates[-1]

    def whole(self, method: str, rate: float) -> Curves:
        """Runs with the gradient of all samples."""
        return self._curves([whole(self.settings, method, rate, seed) for seed in range(self.settings.seeds)])

    def single(self, method: str, noise: float = 0.0) -> Curves:
        """Runs with the gradient of one sample."""
        return self._curves([single(self.settings, method, noise, seed) for seed in range(self.settings.seeds)])

    def lone(self, rate: float) -> Curves:
        """Runs of single weights, rounded to nearest."""
        runs = [whole(self.settings, NEAREST, rate, seed) for seed in range(self.settings.seeds)]
        return self._curves([Run(**{**vars(run), "dimensions": 1}) for run in runs])

    def _curves(self, runs: Sequence[Run]) -> Curves:
        return Curves([self._of[run] for run in runs], self._epsilon)

    def report(self) -> Report:
        """The complete report."""
        return Report(self.study, [self._setting(), self._table(), *self._pictures()], self._claims(), self._meaning())

    def _setting(self) -> str:
        chosen = self.settings
        return (
            f"{chosen.problems * chosen.seeds} least-squares problems in {chosen.dimensions} dimensions: {chosen.samples} samples of "
            "normal data, optimal weights uniform in [0, 100), descent from zero. The gradient is computed from all samples, or from "
            f"one as in Figure 2 of the paper. Rounding is to {chosen.format}. Without noise in the labels the optimum is rounded too: "
            "assumption A1, that the model fits every sample, holds for weights in a format only if it contains the best ones. "
            "Distances are not squared, and are in units of Theorem 1's published bound, problem by problem. With the gradient of one "
            "sample, L is the largest of all samples', and the bound is so small that it is below the distance between the format's "
            "levels; with the gradient of all samples it is above."
        )

    def _table(self) -> Table:
        ways = [("all samples", f"{rate:g}", [self.whole(method, rate) for method in METHODS]) for rate in self.settings.rates]
        ways.append(("one sample", f"{self.settings.sample_rate:g}", [self.single(method) for method in METHODS]))
        rows = [[of, rate, *(_spread(curves.final / curves.printed) for curves in found)] for of, rate, found in ways]
        title = "Distance at the end in units of Theorem 1's bound: median (range) over problems"
        return Table(title, ["gradient of", "rate", *METHODS], rows)

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
                "Where rounding to nearest stops, with the gradient of all samples; geometric means. Bars: 95 % intervals over problems.",
                self._rates,
            ),
            Picture(
                "loss",
                "Figure 2: training loss with noise in the labels, one sample per step; means over problems and steps.",
                self._losses,
            ),
        ]

    def _distances(self) -> Figure:
        figure, axes = figures.panels(1, 2, sharey=True)
        titles = f"all samples, rate {self._shown:g}", f"one sample, rate {self.settings.sample_rate:g}"
        sides = [{method: self.whole(method, self._shown) for method in METHODS}, {method: self.single(method) for method in METHODS}]
        for panel, found, title in zip(axes, sides, titles, strict=True):
            for place, (method, look) in enumerate(zip(METHODS, figures.LOOKS, strict=False)):
                curves = found[method]
                low, middle, high = np.quantile(curves.distances / curves.printed, [0.05, 0.5, 0.95], axis=1)
                drawn = np.where(middle > _FLOOR, middle, np.nan)
                panel.plot(curves.steps, drawn, label=method, **_drawn(look, method, place))
                panel.fill_between(curves.steps, np.maximum(low, _FLOOR), np.maximum(high, _FLOOR), where=middle > _FLOOR,
                                   color=look.color, alpha=0.15, linewidth=0)  # fmt: skip
            panel.axhline(1, label="Theorem 1's bound", **figures.REFERENCE())
            panel.axhline(1 / _BELOW, label=f"bound / {_BELOW}", **figures.REFERENCE(linestyle=(0, (5, 2)), linewidth=1.0))
            panel.set_yscale("log")
            panel.set_xlabel("step")
            panel.set_title(title)
        axes[0].set_ylabel("distance / Theorem 1's bound")
        figures.legend(figure, axes[0], columns=4)
        return figure

    def _rates(self) -> Figure:
        figure, (panel,) = figures.panels(width=5.0, height=3.0)
        rates = self.settings.rates
        found = [self.whole(NEAREST, rate) for rate in rates]
        figures.band(panel, rates, [_geometric(curves.final) for curves in found], figures.LOOKS[1], "nearest")
        printed, holding = ([_geometric(getattr(curves, name)).value for curves in found] for name in ("printed", "holding"))
        panel.plot(rates, printed, label="Theorem 1's bound", **figures.REFERENCE())
        panel.plot(rates, holding, label="bound, corrected proof", **figures.REFERENCE(linestyle=(0, (5, 2))))
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.minorticks_off()
        figures.plain_numbers(panel.yaxis)
        panel.set_xlabel("learning rate")
        panel.set_ylabel("distance at the end")
        figures.legend(figure, panel, columns=3)
        return figure

    def _losses(self) -> Figure:
        figure, (panel,) = figures.panels(width=4.4, height=3.0)
        for place, (method, look) in enumerate(zip(METHODS, figures.LOOKS, strict=False)):
            curves = self.single(method, self.settings.noise)
            panel.plot(curves.steps, curves.losses.mean(1), label=method, **_drawn(look, method, place))
        panel.set_yscale("log")
        panel.set_xlabel("step")
        panel.set_ylabel("training loss")
        figures.legend(figure, panel, columns=3)
        return figure

    def _claims(self) -> list[Claim]:
        return [self._above(), self._tight(), *map(self._below, (EXACT, COMPUTE, STOCHASTIC, KAHAN)), self._single_sample(), self._worse(),
                self._theorem_2(), *self._figure_2()]  # fmt: skip

    def _above(self) -> Claim:
        found = [self.whole(NEAREST, rate) for rate in self.settings.rates] + [self.single(NEAREST)]
        lowest = min(float((curves.lowest / curves.printed).min()) for curves in found)
        return Claim(
            "Theorem 1",
            "weights that are rounded to nearest never come closer to the optimum than the bound",
            f"of {sum(len(curves.lowest) for curves in found)} descents, the closest came within {lowest:.3g} times the bound",
            lowest >= 1,
        )

    def _tight(self) -> Claim:
        found = [self.lone(rate) for rate in self.settings.rates]
        lowest, held = (min(float((c.lowest / getattr(c, name)).min()) for c in found) for name in ("printed", "holding"))
        share = float(np.mean(np.concatenate([curves.lowest < curves.printed for curves in found])))
        return Claim(
            "Theorem 1, of a single weight",
            "the same, with the published constants",
            f"{share:.0%} of the descents come closer, down to {lowest:.3g} times the bound; to {held:.3g} times the bound "
            "that the proof gives if updates are lost only up to half a distance and the last step is rounded as well",
            lowest >= 1,
        )

    def _below(self, method: str) -> Claim:
        found = [self.whole(method, rate) for rate in self.settings.rates]
        worst = max(float((curves.final / curves.printed).max()) for curves in found)
        return Claim(
            _WHERE[method],
            f"{_NAMES[method]}, weights approach the optimum beyond where nearest rounding stops; here: to {_BELOW} times below the bound",
            f"gradient of all samples: the descent that ends farthest is at {worst:.2g} times the bound",
            worst <= 1 / _BELOW,
        )

    def _single_sample(self) -> Claim:
        stochastic, nearest = self.single(STOCHASTIC), self.single(NEAREST)
        ratio = mean((stochastic.final / nearest.final).tolist())
        return Claim(
            "Section 3.2",
            "with stochastic updates progress continues where nearest rounding halts, also with one sample per step",
            f"at {ratio:.3g} of the distance of nearest, which is a median of {np.median(stochastic.final / stochastic.printed):.2g} times "
            "the bound: disagreeing samples keep weights moving among the levels next to the optimum",
            True if ratio.high < 1 else False if ratio.low > 1 else None,
        )

    def _worse(self) -> Claim:
        logs = np.log([self.whole(NEAREST, rate).final for rate in self.settings.rates])
        slopes = np.polyfit(np.log(self.settings.rates), logs, 1)[0]
        found = mean(slopes.tolist())
        return Claim(
            "Section 3.1",
            "the smaller the learning rate, the farther from the optimum nearest rounding stops",
            f"as the rate to the power {found:.2f}",
            True if found.high < 0 else False if found.low > 0 else None,
        )

    def _theorem_2(self) -> Claim:
        found = [self.whole(COMPUTE, rate) for rate in self.settings.rates] + [self.single(COMPUTE)]
        worst = max((mean(row.tolist()) for curves in found for row in curves.beside_theorem_2()), key=lambda interval: interval.value)
        return Claim(
            "Theorem 2",
            "with nearest rounding only in the forward and backward passes, the mean squared distance stays below a bound that goes to 0",
            f"at most {worst:.3g} times the bound, at any step",
            True if worst.high <= 1 else False if worst.low > 1 else None,
        )

    def _figure_2(self) -> list[Claim]:
        def beside(method: str) -> Interval:
            exact, other = (self.single(name, self.settings.noise).losses[-1] for name in (EXACT, method))
            return _geometric(other / exact)

        nearest, compute = beside(NEAREST), beside(COMPUTE)
        return [
            Claim(
                "Figure 2",
                "the loss with weights rounded to nearest saturates magnitudes above the one without rounding",
                f"{nearest:.3g} times as high at the end",
                True if nearest.low > 10 else False if nearest.high < 10 else None,
            ),
            Claim(
                "Figure 2",
                "with nearest rounding only in the forward and backward passes, it saturates close to the one without rounding",
                f"{compute:.4g} times as high at the end",
                True if compute.high < 1.1 else False if compute.low > 1.1 else None,
            ),
        ]

    def _meaning(self) -> str:
        nearest = self.whole(NEAREST, self._shown)
        others = [self.whole(method, self._shown) for method in METHODS if method != NEAREST]
        farthest = max(float((curves.final / curves.printed).max()) for curves in others)
        return (
            f"At a rate of {self._shown:g} {self.settings.format} weights that are rounded to nearest stop after a median of "
            f"{1 - np.median(nearest.final / nearest.start):.0%} of the way to the optimum. With unrounded, stochastic and Kahan "
            f"updates, and with everything except the weights rounded, descents end within {farthest:.0e} of Theorem 1's bound."
        )


def _geometric(values: Array) -> Interval:
    """The geometric mean and its interval."""
    return exponential(mean(np.log(values).tolist()))


def _spread(values: Array) -> str:
    low, middle, high = (f"{value:.2g}" for value in np.quantile(values, [0, 0.5, 1]))
    return f"{middle} ({low} to {high})" if low != high else middle


def _drawn(look: figures.Look, method: str, place: int) -> dict[str, Any]:
    """The style of a curve that others cover: markers alternate, and dashes show the one without rounding."""
    return (look.dashed() if method == COMPUTE else look)(markevery=(2 * place, 10))
