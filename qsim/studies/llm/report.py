"""The report of the study `llm`: perplexity, time and memory of each method, and the effect of more bits."""

from __future__ import annotations

from itertools import product

from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.learners.gpt import parameters, size
from qsim.studies.learners.gpt_training import KAHAN, NEAREST, STOCHASTIC, described, variant
from qsim.studies.llm import METHODS, MORE_BITS
from qsim.studies.llm.findings import SAME, LanguageFindings, excess_percent, excess_text
from qsim.studies.llm.training import O1, O2
from qsim.studies.report import Picture, listed
from qsim.studies.statistics import Interval, difference, exponential, mean
from qsim.text.tables import Table

_KEPT = {
    STOCHASTIC: "all in BF16",
    KAHAN: "all in BF16, and the compensation",
    NEAREST: "all in BF16",
    O1: "FP32; products in BF16 by autocast",
    O2: "weights in BF16; a copy, states and gradients in FP32",
}


class Written(LanguageFindings):
    """The report."""

    def title(self) -> str:
        """The question, and the model if it is another one."""
        chosen = self.settings
        if not self.several:
            return f"{self.study.question} {variant(chosen.size[0], chosen.vocabulary, chosen.context)}".rstrip()
        least, *_, most = (parameters(size(name), chosen.vocabulary, chosen.context) for name in chosen.size)
        return f"{self.study.question} GPTs with {least:,} to {most:,} parameters"

    def parts(self) -> list[str | Table | Picture]:
        """The setting, and tables and figures of what was measured."""
        costs = [self._costs()] if self.of_cost else []
        cost = [self.picture("cost", self._draw_cost)] if self.on_gpu else []
        if not self.of_perplexity:
            return [self._setting(), *costs, *cost]
        bits = [self._more_bits()] if self.of_bits else []
        second = "each method at its tuned rate" if self.settings.tuned else "both at the same rate"
        first = self.picture("perplexity", self._draw_perplexity, second=second)
        last = [self.picture("more-bits", self._draw_more_bits)] if self.of_bits else []
        return [self._setting(), self._perplexities(), *costs, *bits, first, *cost, *last]

    def _setting(self) -> str:
        chosen = self.settings
        said = [
            *(["perplexity"] if self.of_perplexity else []),
            *(["tuned"] if chosen.tuned else []),
            *(["cost", "peak" if self.on_gpu else "processor"] if self.of_cost else ["no cost"]),
        ]
        return self.text(
            "setting",
            learner=described(chosen.size, chosen.vocabulary, chosen.context, chosen.data, chosen.tokens),
            measured="".join(f"{self.text(name)} " for name in said),
            over="over seeds; for speed and memory, over seeds and rates" if self.of_cost else "over seeds",
        )

    def _perplexities(self) -> Table:
        rows = []
        for method in self.settings.methods:
            tried = [exponential(mean(self.tried(method, rate))) for rate in self.settings.rates]
            found = [f"{each.value if self.settings.tuned else each:.3f}" for each in tried]
            if self.settings.tuned:
                found.append(f"{exponential(mean(self.losses(method, self.best(method)))):.3f} at {self.best(method):g}")
            beside = "-" if method == O1 else excess_text(self.beside(method, O1))
            rows.append([METHODS[method], _KEPT[method], *found, beside])
        columns = [f"rate {rate:g}{', tuning seed' if self.settings.tuned else ''}" for rate in self.settings.rates]
        header = [
            "method",
            "stored in",
            *columns,
            *(["judged seeds"] if self.settings.tuned else []),
            "relative to O1, each at its best rate",
        ]
        return Table.of(f"Validation perplexity per {self.unit}", header, rows)

    def _costs(self) -> Table:
        columns = {"tokens_per_second": ("tokens per second", "times O1's speed", ".0f")}
        if self.on_gpu:
            columns["peak_mib"] = ("peak memory in MiB", "times O1's memory", ".0f")
        rows = []
        for model, method in product(self.settings.size, self.settings.methods):
            cells = [model, METHODS[method]]
            for what, (*_, spec) in columns.items():
                times = "-" if method == O1 else f"{self.ratio(method, O1, what, model):.3f}"
                cells += [format(mean(self.cost(method, what, model)).value, spec), times]
            rows.append(cells)
        header = ["model", "method", *(cell for *titles, _ in columns.values() for cell in titles)]
        return Table.of("Speed and memory" if self.on_gpu else "Speed on a processor", header, rows)

    def _more_bits(self) -> Table:
        rate = self.settings.middle
        rows = [["BF16", "BF16", f"{exponential(mean(self.losses(STOCHASTIC, rate))):.3f}", "-"]]
        for states, gradients in MORE_BITS:
            perplexity = exponential(mean(self.losses(STOCHASTIC, rate, states, gradients)))
            rows.append([states.upper(), gradients.upper(), f"{perplexity:.3f}", excess_text(self.more_bits(states, gradients))])
        return Table.of(
            f"Stochastic updates with more bits elsewhere, at a rate of {rate:g}",
            ["moments in", "gradients summed in", "perplexity", "relative to all in BF16"],
            rows,
        )

    def _draw_perplexity(self) -> list[Figure]:
        drawn_panels, (over, end) = figures.row(2)
        drawn: list[Interval] = []
        tuned = self.settings.tuned
        labels = ["the tuned one of each"] if tuned else [f"{rate:g}" for rate in self.settings.rates]
        others = [
            (look, method) for look, method in zip(figures.LOOKS, METHODS, strict=False) if method in self.settings.methods and method != O1
        ]
        for place, (look, method) in enumerate(others):
            steps, ratios = self._over_training(method)
            tokens = [(count + 0.01 * (place - 1.5) * steps[-1]) * self.tokens / self.settings.steps / 1e3 for count in steps]
            figures.band(over, tokens, ratios, look, METHODS[method])
            at = [number + 0.15 * (place - 1.5) for number in range(len(labels))]
            ends = [excess_percent(self.beside_at(rate, method, O1)) for rate in self.settings.rates] if not tuned else ratios[-1:]
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
        end.set_xticks(range(len(labels)), labels)
        end.set(xlim=(-0.5, len(labels) - 0.5), xlabel=f"peak learning rate{'' if tuned else ' of both'}")
        figures.legends(drawn_panels, (over, end), columns=2)
        return drawn_panels

    def _over_training(self, method: str) -> tuple[list[int], list[Interval]]:
        """The steps at which models were validated, and their perplexity then relative to O1, each at its best rate, in percent."""
        own, other = ([result["curve"] for result in self.trained(name, self.best(name))] for name in (method, O1))
        steps = [step for step, _ in own[0]]
        ahead = [difference(*([curve[at][1] for curve in curves] for curves in (own, other))) for at in range(len(steps))]
        return steps, [excess_percent(exponential(each)) for each in ahead]

    def _draw_cost(self) -> list[Figure]:
        drawn, axes = figures.row(2)
        chosen = self.settings
        millions = [parameters(size(name), chosen.vocabulary, chosen.context) / 1e6 for name in chosen.size]
        for panel, (what, label) in zip(axes, (("tokens_per_second", "speed"), ("peak_mib", "peak memory")), strict=True):
            panel.axhline(1, label=METHODS[O1], **figures.REFERENCE())
            others = [method for method in chosen.methods if method != O1]
            ratios = {METHODS[method]: [self.ratio(method, O1, what, name) for name in chosen.size] for method in others}
            figures.bands(panel, millions, ratios)
            panel.set_xscale("log")
            panel.set(xlabel="parameters in millions", ylabel=f"{label} relative to O1")
            figures.plain_numbers(panel.xaxis)
        figures.legends(drawn, axes, columns=2)
        return drawn

    def _draw_more_bits(self) -> Figure:
        (figure,), (axes,) = figures.row(1)
        axes.axhspan(-100 * SAME, 100 * SAME, color="#808080", alpha=0.25, linewidth=0)
        axes.axhline(0, **figures.REFERENCE())
        found = [excess_percent(self.more_bits(*bits)) for bits in MORE_BITS]
        figures.band(axes, range(len(MORE_BITS)), found, figures.LOOKS[0].alone())
        axes.set_xticks(range(len(MORE_BITS)), [f"{states.upper()}\n{gradients.upper()}" for states, gradients in MORE_BITS])
        axes.set(xlim=(-0.5, len(MORE_BITS) - 0.5), xlabel="moments in (above), gradients in (below)")
        axes.set_ylabel("perplexity relative\nto all in BF16, in %")
        return figure

    def meaning(self) -> str:
        """Savings, and the perplexity of stochastic updates."""
        return " ".join([*([self._saved()] if self.of_cost else []), *([self._learnt()] if self.of_perplexity else [])])

    def _saved(self) -> str:
        if not self.on_gpu:
            return self.text("no savings")
        costs = ("tokens_per_second", "peak_mib")
        found = [[self.ratio(STOCHASTIC, O1, what, name).value for name in self.settings.size] for what in costs]
        speed, memory = (" to ".join(f"{value:.2f}" for value in sorted({min(each), max(each)})) for each in found)
        return self.text("saved", speed=speed, memory=memory)

    def _learnt(self) -> str:
        edges, rate = [METHODS[method] for method in self.settings.methods if not self.inside(method)], self.settings.rates[0]
        same = edges and not self.settings.tuned
        against = {
            key: excess_text(self.beside_at(rate, STOCHASTIC, other) if same else self.beside(STOCHASTIC, other))
            for key, other in (("o1", O1), ("nearest", NEAREST))
        }
        where = f"at a learning rate of {rate:g}" if same else "with each method at its best learning rate"
        found = self.text("learnt", where=where, **against)
        which = "every method" if len(edges) == len(self.settings.methods) else listed(edges)
        return f"{found} {self.text('at the edge', which=which)}" if edges else found
