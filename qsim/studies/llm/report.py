"""The report of the study `llm`: perplexity, time and memory of each method, and the effect of more bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import matplotlib

from qsim import figures
from qsim.studies.learners.gpt_training import KAHAN, NEAREST, STOCHASTIC, described
from qsim.studies.llm import LLM, METHODS, MORE_BITS, Settings, run_of
from qsim.studies.llm.training import BF16, FP32, O1, O2, Run
from qsim.studies.report import Claim, Picture, Report, Table
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, above, bars, below, difference, exponential, mean, percent, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Differences up to these count as none: one percent of perplexity, and three of speed.
SAME, SAME_SPEED = 0.01, 0.03
#: Up to this factor counts as marginally faster.
MARGINALLY = 1.1
_RATIO = "ratio of perplexities, each method at its best rate, seed by seed"
_TUNED = "the side of 1 on which the interval is, if both best rates are inside of the grid: at its edge a method is not tuned"
_KEPT = {
    STOCHASTIC: "all in BF16",
    KAHAN: "all in BF16, and the compensation",
    NEAREST: "all in BF16",
    O1: "FP32; products in BF16 by autocast",
    O2: "weights in BF16; a copy, states and gradients in FP32",
}


class Findings:
    """The results of a study, grouped by method.

    Args:
        study: The study.
        settings: Its settings.
        results: The results of all runs.
    """

    def __init__(self, study: LLM, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        self._of = {result.run: result for result in results}
        self.on_gpu = all(result["peak_mib"] is not None for result in results)
        self.tokens = settings.steps * settings.batch * settings.context

    def report(self) -> Report:
        """The complete report."""
        return Report(
            self.study,
            [self._setting(), self._perplexities(), self._costs(), self._more_bits(), *self._pictures()],
            self._claims(),
            self._meaning(),
        )

    def results(self, method: str, rate: float, states: str = "", gradients: str = "") -> list[Result[Run]]:
        """The results of a method at a rate, one per seed; with its own states and gradients, unless others are named."""
        own = FP32 if method in (O1, O2) else BF16
        runs = [run_of(self.settings, method, rate, seed, states or own, gradients or own) for seed in range(self.settings.seeds)]
        return [self._of[run] for run in runs]

    def losses(self, method: str, rate: float, states: str = "", gradients: str = "") -> list[float]:
        """Nats per byte of held-out text, one per seed."""
        return [float(result["loss"]) for result in self.results(method, rate, states, gradients)]

    def best(self, method: str) -> float:
        """The rate at which a method does best; the paper also tunes the rate of each method."""
        means = {rate: mean(self.losses(method, rate)).value for rate in self.settings.rates}
        return min(means, key=lambda rate: means[rate] if math.isfinite(means[rate]) else math.inf)

    def inside(self, *methods: str) -> bool:
        """Whether the best rate of each method has lower and higher ones next to it, which may be better otherwise."""
        return not {self.settings.rates[0], self.settings.rates[-1]} & {self.best(method) for method in methods}

    def beside(self, method: str, other: str) -> Interval:
        """The ratio of two methods' perplexities, each at its best rate."""
        return exponential(difference(self.losses(method, self.best(method)), self.losses(other, self.best(other))))

    def beside_at(self, rate: float, method: str, other: str) -> Interval:
        """The ratio of two methods' perplexities, both at one rate."""
        return exponential(difference(self.losses(method, rate), self.losses(other, rate)))

    def more_bits(self, states: str, gradients: str) -> Interval:
        """The ratio of the perplexity with other states and gradients to that with everything in BF16, under stochastic updates."""
        rate = self.settings.middle
        return exponential(difference(self.losses(STOCHASTIC, rate, states, gradients), self.losses(STOCHASTIC, rate)))

    def cost(self, method: str, what: str) -> list[float]:
        """Tokens per second, or memory, of every run."""
        return [float(result[what]) for rate in self.settings.rates for result in self.results(method, rate)]

    def ratio(self, method: str, other: str, what: str) -> Interval:
        """The ratio of two methods' speed or memory, run by run."""
        return exponential(difference(*([math.log(value) for value in self.cost(name, what)] for name in (method, other))))

    def _setting(self) -> str:
        chosen = self.settings
        where = (
            "Peak memory is the most that torch had allocated at one time. "
            if self.on_gpu
            else "These runs used a CPU without BF16 products: the speed of methods there says nothing about a GPU. "
        )
        return (
            f"{described(chosen.size, chosen.vocabulary, chosen.context, chosen.data)}, with {chosen.vocabulary} tokens and contexts of "
            f"{chosen.context}, in {chosen.steps} updates of {chosen.batch} sequences in {chosen.micro_batches} micro-batches: "
            f"{self.tokens:,} tokens, by "
            "AdamW with betas 0.9 and 0.95, weight decay 0.1, gradients clipped at 1, and a learning rate that rises for a tenth of the "
            f"steps and decays along a cosine to a tenth. There are {chosen.seeds} seeds; all methods begin with the same weights and "
            "see the same sequences. Perplexity is per byte of held-out text, in the method's own precision. Tokens per second are "
            f"those of training, without validation and the steps of the warm-up, when kernels are compiled. {where}Intervals are "
            f"{percent()}, over seeds; for speed and memory, over seeds and rates. The paper's models have 350 million to 6.7 billion "
            "parameters and "
            "see 20 to 49 billion tokens, on 8 to 64 A100."
        )

    def _perplexities(self) -> Table:
        rows = []
        for method, label in METHODS.items():
            found = [f"{exponential(mean(self.losses(method, rate))):.3f}" for rate in self.settings.rates]
            rows.append([label, _KEPT[method], *found, "-" if method == O1 else _percent(self.beside(method, O1))])
        header = ["method", "stored in", *(f"rate {rate:g}" for rate in self.settings.rates), "relative to O1, each at its best rate"]
        return Table("Validation perplexity per byte", header, rows)

    def _costs(self) -> Table:
        columns = {"tokens_per_second": ("tokens per second", ".0f")}
        if self.on_gpu:
            columns["peak_mib"] = ("peak memory in MiB", ".0f")
        rows = []
        for method, label in METHODS.items():
            cells = [label]
            for what, (_, spec) in columns.items():
                times = "-" if method == O1 else f"{self.ratio(method, O1, what):.3f}"
                cells += [format(mean(self.cost(method, what)).value, spec), times]
            rows.append(cells)
        header = ["method", *(cell for title, _ in columns.values() for cell in (title, "times O1's"))]
        return Table("Speed and memory" if self.on_gpu else "Speed on a processor", header, rows)

    def _more_bits(self) -> Table:
        rate = self.settings.middle
        rows = [["BF16", "BF16", f"{exponential(mean(self.losses(STOCHASTIC, rate))):.3f}", "-"]]
        for states, gradients in MORE_BITS:
            perplexity = exponential(mean(self.losses(STOCHASTIC, rate, states, gradients)))
            rows.append([states.upper(), gradients.upper(), f"{perplexity:.3f}", _percent(self.more_bits(states, gradients))])
        return Table(
            f"Stochastic updates with more bits elsewhere, at a rate of {rate:g}",
            ["moments in", "gradients summed in", "perplexity", "relative to all in BF16"],
            rows,
        )

    def _pictures(self) -> list[Picture]:
        cost = Picture("cost", f"Tokens per second in training, and peak memory. {bars('seeds and rates')}", self._draw_cost)
        return [
            Picture(
                "perplexity",
                "Perplexity of held-out text relative to O1 with the same seed. First: over training, each method at its best rate. "
                f"Second: at the end, both at the same rate. {bars()}",
                self._draw_perplexity,
            ),
            *([cost] if self.on_gpu else []),
            Picture(
                "more-bits",
                "Perplexity under stochastic updates with moments or gradients in FP32, relative to all in BF16 with the same seed. "
                f"Grey: differences that count as none. {bars()}",
                self._draw_more_bits,
            ),
        ]

    def _draw_perplexity(self) -> list[Figure]:
        drawn_panels, (over, end) = figures.row(2)
        drawn: list[Interval] = []
        others = [(look, method) for look, method in zip(figures.LOOKS, METHODS, strict=False) if method != O1]
        for place, (look, method) in enumerate(others):
            steps, ratios = self._over_training(method)
            tokens = [(count + 0.01 * (place - 1.5) * steps[-1]) * self.tokens / self.settings.steps / 1e3 for count in steps]
            figures.band(over, tokens, ratios, look, METHODS[method])
            at = [number + 0.15 * (place - 1.5) for number in range(len(self.settings.rates))]
            ends = [_in_percent(self.beside_at(rate, method, O1)) for rate in self.settings.rates]
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
        end.set_xticks(range(len(self.settings.rates)), [f"{rate:g}" for rate in self.settings.rates])
        end.set_xlim(-0.5, len(self.settings.rates) - 0.5)
        end.set_xlabel("peak learning rate of both")
        for figure, panel in zip(drawn_panels, (over, end), strict=True):
            figures.legend(figure, panel, columns=2)
        return drawn_panels

    def _over_training(self, method: str) -> tuple[list[int], list[Interval]]:
        """The steps at which models were validated, and their perplexity then relative to O1, each at its best rate, in percent."""
        own, other = ([result["curve"] for result in self.results(name, self.best(name))] for name in (method, O1))
        steps = [step for step, _ in own[0]]
        ahead = [difference(*([curve[at][1] for curve in curves] for curves in (own, other))) for at in range(len(steps))]
        return steps, [_in_percent(exponential(each)) for each in ahead]

    def _draw_cost(self) -> list[Figure]:
        drawn, axes = figures.row(2, height=2.2)
        wanted: tuple[tuple[str, str, Callable[[float], float]], ...] = (
            ("tokens_per_second", "thousand tokens per second", lambda value: value / 1e3),
            ("peak_mib", "peak memory in GiB", lambda value: value / 1024),
        )
        bars = {"capsize": 2, "elinewidth": 0.9, "ecolor": matplotlib.rcParams["text.color"]}
        for panel, (what, label, unit) in zip(axes, wanted, strict=True):
            for place, (look, method) in enumerate(zip(figures.LOOKS, METHODS, strict=False)):
                found = mean([unit(value) for value in self.cost(method, what)])
                error = [[found.value - found.low], [found.high - found.value]]
                panel.barh(place, found.value, 0.65, xerr=error, color=look.color, error_kw=bars)
            panel.set_xlabel(label)
            panel.set_yticks(range(len(METHODS)), list(METHODS.values()))
            panel.invert_yaxis()
        return drawn

    def _draw_more_bits(self) -> Figure:
        (figure,), (axes,) = figures.row(1)
        axes.axhspan(-100 * SAME, 100 * SAME, color="#808080", alpha=0.25, linewidth=0)
        axes.axhline(0, **figures.REFERENCE())
        found = [_in_percent(self.more_bits(*bits)) for bits in MORE_BITS]
        figures.band(axes, range(len(MORE_BITS)), found, figures.LOOKS[0].alone())
        axes.set_xticks(range(len(MORE_BITS)), [f"{states.upper()}\n{gradients.upper()}" for states, gradients in MORE_BITS])
        axes.set_xlim(-0.5, len(MORE_BITS) - 0.5)
        axes.set_xlabel("moments in (above), gradients in (below)")
        axes.set_ylabel("perplexity relative\nto all in BF16, in %")
        return figure

    def _claims(self) -> list[Claim]:
        return [self._as_good(), self._nearest_worse(), self._kahan(), *self._speeds(), *self._memories(), self._no_difference()]

    def _as_good(self) -> Claim:
        found = self.beside(STOCHASTIC, O1)
        return Claim(
            "Table 2",
            "BF16 with stochastic updates slightly outperforms mixed precision: 14.07 to 14.45 with 350 million parameters, 10.05 to 10.11 "
            "with 6.7 billion",
            self._compared(STOCHASTIC, O1),
            below(found, 1.0) if self.inside(STOCHASTIC, O1) else None,
            test=_RATIO,
            rule=_TUNED,
            power=_by(found),
        )

    def _nearest_worse(self) -> Claim:
        found = self.beside(NEAREST, STOCHASTIC)
        return Claim(
            "Table 2",
            "it significantly outperforms BF16 with updates rounded to nearest: 14.07 to 16.38 with 350 million parameters, 10.05 to 11.64 "
            "with 6.7 billion",
            self._compared(NEAREST, STOCHASTIC),
            above(found, 1.0) if self.inside(NEAREST, STOCHASTIC) else None,
            test=_RATIO,
            rule=_TUNED,
            power=_by(found),
        )

    def _compared(self, method: str, other: str) -> str:
        """One method relative to another: each at its best rate, which decides, and both at the same rate."""
        rates = self.settings.rates if len(self.settings.rates) > 1 else ()
        same = "".join(f"; both at {rate:g}: {_percent(self.beside_at(rate, method, other))}" for rate in rates)
        return f"relative to {METHODS[other]}, each at its best rate: {_percent(self.beside(method, other))}{same}"

    def _kahan(self) -> Claim:
        found = self.beside(KAHAN, O1)
        return Claim(
            "Zamirai et al., Revisiting BFloat16 Training, Section 4",
            "BF16 with Kahan summation matches training with weights in FP32",
            f"relative to O1: {_percent(found)}",
            _same([found], SAME) if self.inside(KAHAN, O1) else None,
            test=_RATIO,
            rule=f"equal if the interval is within {SAME:.0%}, less than half of what the paper reports as an improvement, and both best "
            "rates are inside of the grid",
            power=_by(found),
        )

    def _speeds(self) -> list[Claim]:
        o1, o2, nearest = (self.ratio(STOCHASTIC, other, "tokens_per_second") for other in (O1, O2, NEAREST))
        # Speed on a processor is reported, but decides nothing.
        cases = (
            ("Table 4", "faster than O1: 1.07 times with 350 million parameters, 1.54 times with 6.7 billion", o1, above(o1, 1.0),
             "yes if the interval is above 1"),
            ("Table 6", "marginally faster than O2: 1.03 to 1.06 times, 1.3 to 6.7 billion parameters", o2, within(o2, 1.0, MARGINALLY),
             f"yes if the interval is from 1 to {MARGINALLY:g}, a tenth, which is between this and the gains that it calls considerable"),
            ("Section 3", "practically no overhead: as fast as BF16 with updates rounded to nearest", nearest, _same([nearest], SAME_SPEED),
             f"equal if the interval is within {SAME_SPEED:.0%}, the smallest gain that the paper reports"),
        )  # fmt: skip
        where = "" if self.on_gpu else ", on a processor"
        return [
            Claim(
                source,
                paper,
                f"{found:.3f} times{where}",
                verdict if self.on_gpu else None,
                test="ratio of tokens per second, over seeds and rates",
                rule=rule,
                power=_by(found) if self.on_gpu else "none: a processor has no BF16 units",
            )
            for source, paper, found, verdict, rule in cases
        ]

    def _memories(self) -> list[Claim]:
        papers = {
            O1: ("Table 5", "less memory than mixed precision: 186 GB to 234 with 350 million parameters, 208 to 298 with 770 million"),
            O2: ("Section 5.2", "the least memory of all, because all tensors are BF16: less than O2"),
        }
        told = {"test": "ratio of peak memory, over seeds and rates", "rule": "yes if the interval is below 1, no if above"}
        claims = []
        for other, (source, paper) in papers.items():
            if not self.on_gpu:
                claims.append(Claim(source, paper, "not measured on a processor", None, **told, power="none"))
                continue
            found = self.ratio(STOCHASTIC, other, "peak_mib")
            claims.append(Claim(source, paper, f"{found:.3f} times", below(found, 1.0), **told, power=_by(found)))
        return claims

    def _no_difference(self) -> Claim:
        found = [self.more_bits(*bits) for bits in MORE_BITS]
        told = "; ".join(
            f"moments {states.upper()}, gradients {gradients.upper()}: {_percent(each)}"
            for (states, gradients), each in zip(MORE_BITS, found, strict=True)
        )
        return Claim(
            "Figure 4",
            "moments and gradients with more bits change virtually nothing under stochastic updates",
            told,
            _same(found, SAME),
            test="ratio of perplexities with the same seeds, at one rate",
            rule=f"equal if all intervals are within {SAME:.0%}, less than half of what the paper reports as an improvement",
            power=_by(max(found, key=lambda each: each.detects)),
        )

    def _meaning(self) -> str:
        rate = self.settings.rates[0]
        against = {other: self.beside_at(rate, STOCHASTIC, other) for other in (O1, NEAREST)}
        found = (
            f"At a rate of {rate:g}, a GPT ({self.settings.size}) in BF16 with stochastic updates ends {self.tokens:,} tokens with a "
            f"perplexity {_percent(against[O1])} relative to mixed precision (O1), and {_percent(against[NEAREST])} relative to BF16 with "
            "updates rounded to nearest"
        )
        edges = [METHODS[method] for method in METHODS if not self.inside(method)]
        tuned = f" The best rate is at the edge of the grid for {', '.join(edges)}: tuned methods are not compared." if edges else ""
        if not self.on_gpu:
            return f"{found}; savings in time and memory can only be measured on a GPU.{tuned}"
        speed, memory = (self.ratio(STOCHASTIC, O1, what).value for what in ("tokens_per_second", "peak_mib"))
        return f"{found}; it runs at {speed:.2f} times the speed of O1 with {memory:.2f} times its memory.{tuned}"


def _by(found: Interval) -> str:
    """The smallest deviation of a ratio from 1 that would have been found."""
    return f"{found.detects - 1:.1%}"


def _same(ratios: Sequence[Interval], share: float) -> bool | None:
    """Whether all ratios are 1, up to a tolerance."""
    low, high = 1 - share, 1 + share
    if any(ratio.high < low or ratio.low > high for ratio in ratios):
        return False
    return True if all(low <= ratio.low and ratio.high <= high for ratio in ratios) else None


def _in_percent(ratio: Interval) -> Interval:
    """The excess of a ratio over 1, in percent."""
    return Interval(*(100 * (bound - 1) for bound in (ratio.value, ratio.low, ratio.high)))


def _percent(ratio: Interval) -> str:
    return f"{_in_percent(ratio):+.2f} %"
