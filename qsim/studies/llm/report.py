"""The report of the study `llm`: perplexity, time and memory of each method, and the effect of more bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import matplotlib

from qsim.plot import figures
from qsim.studies.learners.gpt_training import KAHAN, NEAREST, STOCHASTIC, described, variant
from qsim.studies.llm import METHODS, MORE_BITS, LLMStudy
from qsim.studies.llm.claims import claims
from qsim.studies.llm.findings import SAME, Findings, excess_percent, excess_text
from qsim.studies.llm.training import O1, O2
from qsim.studies.report import Picture, Report, listed
from qsim.studies.statistics import Interval, confidence_text, describe_bars, difference, exponential, mean
from qsim.text.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KEPT = {
    STOCHASTIC: "all in BF16",
    KAHAN: "all in BF16, and the compensation",
    NEAREST: "all in BF16",
    O1: "FP32; products in BF16 by autocast",
    O2: "weights in BF16; a copy, states and gradients in FP32",
}


class ReportWriter:
    """Write the report.

    Args:
        study: The study.
        found: The findings from its runs.
    """

    def __init__(self, study: LLMStudy, found: Findings) -> None:
        self._study, self._found, self._settings = study, found, found.settings

    def report(self) -> Report:
        """The complete report."""
        chosen = self._settings
        title = f"{self._study.question} {variant(chosen.size, chosen.vocabulary, chosen.context)}".rstrip()
        return Report(self._study, [self._setting(), *self._tables(), *self._pictures()], claims(self._found), self._meaning(), title)

    def _tables(self) -> list[Table]:
        costs = [self._costs()] if self._found.of_cost else []
        return [self._perplexities(), *costs, self._more_bits()] if self._found.of_perplexity else costs

    def _setting(self) -> str:
        chosen = self._settings
        found = self._found
        perplexity = "Perplexity is per byte of held-out text, in the method's own precision. " if found.of_perplexity else ""
        where = (
            "Peak memory is the most that torch had allocated at one time. "
            if found.on_gpu
            else "These runs used a CPU without BF16 products: the speed of methods there says nothing about a GPU. "
        )
        cost = "Tokens per second are those of training, without validation and the steps of the warm-up, when kernels are compiled. "
        measured = perplexity + (cost + where if found.of_cost else "Speed and memory were not measured: several runs shared a GPU. ")
        over = "over seeds; for speed and memory, over seeds and rates" if found.of_cost else "over seeds"
        return (
            f"{described(chosen.size, chosen.vocabulary, chosen.context, chosen.data)}, with {chosen.vocabulary} tokens and contexts of "
            f"{chosen.context}, in {chosen.steps} updates of {chosen.batch} sequences in {chosen.micro_batches} micro-batches: "
            f"{found.tokens:,} tokens, by "
            "AdamW with betas 0.9 and 0.95, weight decay 0.1, gradients clipped at 1, and a learning rate that rises for a tenth of the "
            f"steps and decays along a cosine to a tenth. There are {chosen.seeds} seeds; all methods begin with the same weights and "
            f"see the same sequences. {measured}Intervals are {confidence_text()}, {over}. The paper's models have 350 million to 6.7 "
            "billion parameters and see 20 to 49 billion tokens, on 8 to 64 A100."
        )

    def _perplexities(self) -> Table:
        rows = []
        for method, label in METHODS.items():
            found = [f"{exponential(mean(self._found.losses(method, rate))):.3f}" for rate in self._settings.rates]
            rows.append([label, _KEPT[method], *found, "-" if method == O1 else excess_text(self._found.beside(method, O1))])
        header = ["method", "stored in", *(f"rate {rate:g}" for rate in self._settings.rates), "relative to O1, each at its best rate"]
        return Table.of("Validation perplexity per byte", header, rows)

    def _costs(self) -> Table:
        columns = {"tokens_per_second": ("tokens per second", "times O1's speed", ".0f")}
        if self._found.on_gpu:
            columns["peak_mib"] = ("peak memory in MiB", "times O1's memory", ".0f")
        rows = []
        for method, label in METHODS.items():
            cells = [label]
            for what, (*_, spec) in columns.items():
                times = "-" if method == O1 else f"{self._found.ratio(method, O1, what):.3f}"
                cells += [format(mean(self._found.cost(method, what)).value, spec), times]
            rows.append(cells)
        header = ["method", *(cell for *titles, _ in columns.values() for cell in titles)]
        return Table.of("Speed and memory" if self._found.on_gpu else "Speed on a processor", header, rows)

    def _more_bits(self) -> Table:
        rate = self._settings.middle
        rows = [["BF16", "BF16", f"{exponential(mean(self._found.losses(STOCHASTIC, rate))):.3f}", "-"]]
        for states, gradients in MORE_BITS:
            perplexity = exponential(mean(self._found.losses(STOCHASTIC, rate, states, gradients)))
            rows.append([states.upper(), gradients.upper(), f"{perplexity:.3f}", excess_text(self._found.more_bits(states, gradients))])
        return Table.of(
            f"Stochastic updates with more bits elsewhere, at a rate of {rate:g}",
            ["moments in", "gradients summed in", "perplexity", "relative to all in BF16"],
            rows,
        )

    def _pictures(self) -> list[Picture]:
        cost = Picture("cost", f"Tokens per second in training, and peak memory. {describe_bars('seeds and rates')}", self._draw_cost)
        costs = [cost] if self._found.on_gpu else []
        if not self._found.of_perplexity:
            return costs
        return [
            Picture(
                "perplexity",
                "Perplexity of held-out text relative to O1 with the same seed. First: over training, each method at its best rate. "
                f"Second: at the end, both at the same rate. {describe_bars()}",
                self._draw_perplexity,
            ),
            *costs,
            Picture(
                "more-bits",
                "Perplexity under stochastic updates with moments or gradients in FP32, relative to all in BF16 with the same seed. "
                f"Grey: differences that count as none. {describe_bars()}",
                self._draw_more_bits,
            ),
        ]

    def _draw_perplexity(self) -> list[Figure]:
        drawn_panels, (over, end) = figures.row(2)
        drawn: list[Interval] = []
        others = [(look, method) for look, method in zip(figures.LOOKS, METHODS, strict=False) if method != O1]
        for place, (look, method) in enumerate(others):
            steps, ratios = self._over_training(method)
            tokens = [(count + 0.01 * (place - 1.5) * steps[-1]) * self._found.tokens / self._settings.steps / 1e3 for count in steps]
            figures.band(over, tokens, ratios, look, METHODS[method])
            at = [number + 0.15 * (place - 1.5) for number in range(len(self._settings.rates))]
            ends = [excess_percent(self._found.beside_at(rate, method, O1)) for rate in self._settings.rates]
            figures.band(end, at, ends, look.alone(), METHODS[method])
            drawn += ratios + ends
        for panel in (over, end):
            panel.axhline(0, label=METHODS[O1], **figures.REFERENCE())
        over.set_xlabel("tokens in thousands")
        for panel in (over, end):
            panel.set_ylabel("perplexity relative\nto O1, in %")
        # Some intervals are so wide that nothing else would be visible, and a method that diverged has none.
        values = [each.value for each in drawn if abs(each.value) < 1e3] or [0.0]
        aside = 0.75 * max(1.0, max(values) - min(values))
        for panel in (over, end):
            panel.set_ylim(min(values) - aside, max(values) + aside)
        end.set_xticks(range(len(self._settings.rates)), [f"{rate:g}" for rate in self._settings.rates])
        end.set_xlim(-0.5, len(self._settings.rates) - 0.5)
        end.set_xlabel("peak learning rate of both")
        for figure, panel in zip(drawn_panels, (over, end), strict=True):
            figures.legend(figure, panel, columns=2)
        return drawn_panels

    def _over_training(self, method: str) -> tuple[list[int], list[Interval]]:
        """The steps at which models were validated, and their perplexity then relative to O1, each at its best rate, in percent."""
        own, other = ([result["curve"] for result in self._found.results(name, self._found.best(name))] for name in (method, O1))
        steps = [step for step, _ in own[0]]
        ahead = [difference(*([curve[at][1] for curve in curves] for curves in (own, other))) for at in range(len(steps))]
        return steps, [excess_percent(exponential(each)) for each in ahead]

    def _draw_cost(self) -> list[Figure]:
        drawn, axes = figures.row(2, height=2.2)
        wanted: tuple[tuple[str, str, Callable[[float], float]], ...] = (
            ("tokens_per_second", "thousand tokens per second", lambda value: value / 1e3),
            ("peak_mib", "peak memory in GiB", lambda value: value / 1024),
        )
        style = {"capsize": 2, "elinewidth": 0.9, "ecolor": matplotlib.rcParams["text.color"]}
        for panel, (what, label, unit) in zip(axes, wanted, strict=True):
            for place, (look, method) in enumerate(zip(figures.LOOKS, METHODS, strict=False)):
                found = mean([unit(value) for value in self._found.cost(method, what)])
                error = [[found.value - found.low], [found.high - found.value]]
                panel.barh(place, found.value, 0.65, xerr=error, color=look.color, error_kw=style)
            panel.set_xlabel(label)
            panel.set_yticks(range(len(METHODS)), list(METHODS.values()))
            panel.invert_yaxis()
        return drawn

    def _draw_more_bits(self) -> Figure:
        (figure,), (axes,) = figures.row(1)
        axes.axhspan(-100 * SAME, 100 * SAME, color="#808080", alpha=0.25, linewidth=0)
        axes.axhline(0, **figures.REFERENCE())
        found = [excess_percent(self._found.more_bits(*bits)) for bits in MORE_BITS]
        figures.band(axes, range(len(MORE_BITS)), found, figures.LOOKS[0].alone())
        axes.set_xticks(range(len(MORE_BITS)), [f"{states.upper()}\n{gradients.upper()}" for states, gradients in MORE_BITS])
        axes.set_xlim(-0.5, len(MORE_BITS) - 0.5)
        axes.set_xlabel("moments in (above), gradients in (below)")
        axes.set_ylabel("perplexity relative\nto all in BF16, in %")
        return figure

    def _meaning(self) -> str:
        return " ".join([*([self._saved()] if self._found.of_cost else []), *([self._learnt()] if self._found.of_perplexity else [])])

    def _saved(self) -> str:
        if not self._found.on_gpu:
            return "Savings in time and memory can only be measured on a GPU."
        speed, memory = (self._found.ratio(STOCHASTIC, O1, what).value for what in ("tokens_per_second", "peak_mib"))
        return f"Pure BF16 runs at {speed:.2f} times the speed of mixed precision (O1) with {memory:.2f} times its memory."

    def _learnt(self) -> str:
        edges = [METHODS[method] for method in METHODS if not self._found.inside(method)]
        if not edges:
            against = {other: self._found.beside(STOCHASTIC, other) for other in (O1, NEAREST)}
            where = "with each method at its best learning rate"
        else:
            rate = self._settings.rates[0]
            against = {other: self._found.beside_at(rate, STOCHASTIC, other) for other in (O1, NEAREST)}
            where = f"at a learning rate of {rate:g}"
        found = (
            f"After {self._found.tokens:,} tokens {where}, the perplexity with stochastic updates differs by {excess_text(against[O1])} "
            f"from mixed precision, and by {excess_text(against[NEAREST])} from BF16 with updates rounded to nearest."
        )
        which = "every method" if len(edges) == len(METHODS) else listed(edges)
        return f"{found} Tuned methods are not compared, because the best rate of {which} is at the edge of the grid." if edges else found
