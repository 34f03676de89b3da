"""The report of the study `llm`: perplexity, time and memory of each method, and the effect of more bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from qsim import figures
from qsim.studies.learners.gpt_training import KAHAN, NEAREST, STOCHASTIC
from qsim.studies.llm import LLM, METHODS, MORE_BITS, Settings, run_of
from qsim.studies.llm.training import BF16, FP32, O1, O2, Run
from qsim.studies.report import Claim, Picture, Report, Table
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, difference, exponential, mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Differences up to these count as none: one percent of perplexity, and three of speed.
SAME, SAME_SPEED = 0.01, 0.03
#: Up to this factor counts as marginally faster.
MARGINALLY = 1.1
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

    def beside(self, method: str, other: str) -> Interval:
        """The ratio of two methods' perplexities, each at its best rate."""
        return exponential(difference(self.losses(method, self.best(method)), self.losses(other, self.best(other))))

    def beside_at(self, rate: float, method: str, other: str) -> Interval:
        """The ratio of two methods' perplexities, both at one rate."""
        return exponential(difference(self.losses(method, rate), self.losses(other, rate)))

    def more_bits(self, states: str, gradients: str) -> Interval:
        """The ratio of the perplexity with other states and gradients to that with everything in BF16, under stochastic updates."""
        rate = self.settings.rates[-1]
        return exponential(difference(self.losses(STOCHASTIC, rate, states, gradients), self.losses(STOCHASTIC, rate)))

    def cost(self, method: str, what: str) -> list[float]:
        """Tokens per second, or memory, of every run."""
        return [float(result[what]) for rate in self.settings.rates for result in self.results(method, rate)]

    def ratio(self, method: str, other: str, what: str) -> Interval:
        """The ratio of two methods' speed or memory, run by run."""
        return exponential(difference(*([math.log(value) for value in self.cost(name, what)] for name in (method, other))))

    def _setting(self) -> str:
        chosen = self.settings
        data = "the sources of Python's standard library" if chosen.data == "library" else chosen.data
        where = (
            "Peak memory is the most that torch had allocated at one time. "
            if self.on_gpu
            else "These runs used a CPU without BF16 products: the speed of methods there says nothing about a GPU. "
        )
        return (
            f"A GPT (size {chosen.size}, {chosen.vocabulary} tokens, context {chosen.context}) learns {data}, byte by byte, in "
            f"{chosen.steps} updates of {chosen.batch} sequences in {chosen.micro_batches} micro-batches: {self.tokens:,} tokens, by "
            "AdamW with betas 0.9 and 0.95, weight decay 0.1, gradients clipped at 1, and a learning rate that rises for a tenth of the "
            f"steps and decays along a cosine to a tenth. There are {chosen.seeds} seeds; all methods begin with the same weights and "
            "see the same sequences. Perplexity is per byte of held-out text, in the method's own precision. Tokens per second are "
            f"those of training, without validation and the steps of the warm-up, when kernels are compiled. {where}Intervals are 95 %, "
            "over seeds; for speed and memory, over seeds and rates. The paper's models have 350 million to 6.7 billion parameters and "
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
        rate = self.settings.rates[-1]
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
        cost = Picture(
            "cost", "Tokens per second in training, and peak memory. Bars: 95 % intervals over seeds and rates.", self._draw_cost
        )
        return [
            Picture(
                "perplexity",
                "Perplexity of held-out text relative to O1 with the same seed. Left: over training, each method at its best rate. "
                "Right: at the end, both at the same rate. Bars: 95 % intervals over seeds.",
                self._draw_perplexity,
            ),
            *([cost] if self.on_gpu else []),
            Picture(
                "more-bits",
                "Perplexity under stochastic updates with moments or gradients in FP32, relative to all in BF16 with the same seed. "
                "Grey: differences that count as none. Bars: 95 % intervals over seeds.",
                self._draw_more_bits,
            ),
        ]

    def _draw_perplexity(self) -> Figure:
        figure, (over, end) = figures.panels(1, 2, sharey=True)
        drawn: list[Interval] = []
        others = [(look, method) for look, method in zip(figures.LOOKS, METHODS, strict=False) if method != O1]
        for place, (look, method) in enumerate(others):
            steps, ratios = self._over_training(method)
            tokens = [(count + 0.01 * (place - 1.5) * steps[-1]) * self.tokens / self.settings.steps / 1e3 for count in steps]
            figures.band(over, tokens, ratios, look, METHODS[method])
            at = [number + 0.15 * (place - 1.5) for number in range(len(self.settings.rates))]
            ends = [_in_percent(self.beside_at(rate, method, O1)) for rate in self.settings.rates]
            figures.band(end, at, ends, look.alone())
            drawn += ratios + ends
        for panel in (over, end):
            panel.axhline(0, label=METHODS[O1], **figures.REFERENCE())
        over.set_xlabel("tokens in thousands")
        over.set_ylabel("perplexity relative\nto O1, in %")
        # Some intervals are so wide that nothing else would be visible, and a method that diverged has none.
        values = [each.value for each in drawn if abs(each.value) < 1e3] or [0.0]
        aside = 0.75 * max(1.0, max(values) - min(values))
        over.set_ylim(min(values) - aside, max(values) + aside)
        end.set_xticks(range(len(self.settings.rates)), [f"{rate:g}" for rate in self.settings.rates])
        end.set_xlim(-0.5, len(self.settings.rates) - 0.5)
        end.set_xlabel("peak learning rate of both")
        figures.legend(figure, over, columns=3)
        return figure

    def _over_training(self, method: str) -> tuple[list[int], list[Interval]]:
        """The steps at which models were validated, and their perplexity then relative to O1, each at its best rate, in percent."""
        own, other = ([result["curve"] for result in self.results(name, self.best(name))] for name in (method, O1))
        steps = [step for step, _ in own[0]]
        ahead = [difference(*([curve[at][1] for curve in curves] for curves in (own, other))) for at in range(len(steps))]
        return steps, [_in_percent(exponential(each)) for each in ahead]

    def _draw_cost(self) -> Figure:
        figure, axes = figures.panels(1, 2, height=2.2, sharey=True)
        wanted: tuple[tuple[str, str, Callable[[float], float]], ...] = (
            ("tokens_per_second", "thousand tokens per second", lambda value: value / 1e3),
            ("peak_mib", "peak memory in GiB", lambda value: value / 1024),
        )
        for panel, (what, label, unit) in zip(axes, wanted, strict=True):
            for place, (look, method) in enumerate(zip(figures.LOOKS, METHODS, strict=False)):
                found = mean([unit(value) for value in self.cost(method, what)])
                error = [[found.value - found.low], [found.high - found.value]]
                panel.barh(place, found.value, 0.65, xerr=error, color=look.color, error_kw={"capsize": 2, "elinewidth": 0.9})
            panel.set_xlabel(label)
        axes[0].set_yticks(range(len(METHODS)), list(METHODS.values()))
        axes[0].invert_yaxis()
        return figure

    def _draw_more_bits(self) -> Figure:
        figure, (axes,) = figures.panels(1, 1, width=4.2, height=2.6)
        axes.axhspan(-100 * SAME, 100 * SAME, color="#e4e4e4", linewidth=0)
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
            "BF16 with stochastic updates ends at a perplexity no higher than mixed precision: 14.07 to 14.45 with 350 million parameters, "
            "10.05 to 10.11 with 6.7 billion",
            self._compared(STOCHASTIC, O1),
            True if found.high <= 1 else False if found.low > 1 else None,
        )

    def _nearest_worse(self) -> Claim:
        found = self.beside(NEAREST, STOCHASTIC)
        return Claim(
            "Table 2",
            "with updates rounded to nearest it ends at a higher one: 16.38 to 14.07 with 350 million parameters, 11.64 to 10.05 with "
            "6.7 billion",
            self._compared(NEAREST, STOCHASTIC),
            True if found.low > 1 else False if found.high < 1 else None,
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
            f"BF16 with Kahan summation matches training with weights in FP32 (here: within {SAME:.0%} of perplexity)",
            f"relative to O1: {_percent(found)}",
            _same([found], SAME),
        )

    def _speeds(self) -> list[Claim]:
        o1, o2, nearest = (self.ratio(STOCHASTIC, other, "tokens_per_second") for other in (O1, O2, NEAREST))
        # Speed on a processor is reported, but decides nothing.
        verdicts = (
            True if o1.low > 1 else False if o1.high < 1 else None,
            True if o2.low > 1 and o2.high < MARGINALLY else False if o2.high < 1 or o2.low > MARGINALLY else None,
            _same([nearest], SAME_SPEED),
        )
        papers = (
            ("Table 4", "faster than O1: 1.07 times with 350 million parameters, 1.54 times with 6.7 billion"),
            ("Table 6", f"marginally faster than O2: 1.03 to 1.06 times, 1.3 to 6.7 billion parameters (here: up to {MARGINALLY:g} times)"),
            ("Section 3", f"as fast as BF16 with updates rounded to nearest (here: within {SAME_SPEED:.0%})"),
        )
        return [
            Claim(source, paper, f"{found:.3f} times{'' if self.on_gpu else ', on a processor'}", verdict if self.on_gpu else None)
            for (source, paper), found, verdict in zip(papers, (o1, o2, nearest), verdicts, strict=True)
        ]

    def _memories(self) -> list[Claim]:
        papers = {
            O1: ("Table 5", "less memory than mixed precision: 186 GB to 234 with 350 million parameters, 208 to 298 with 770 million"),
            O2: ("Section 5.2", "the least memory of all, because all tensors are BF16: less than O2"),
        }
        claims = []
        for other, (source, paper) in papers.items():
            if not self.on_gpu:
                claims.append(Claim(source, paper, "not measured on a processor", None))
                continue
            found = self.ratio(STOCHASTIC, other, "peak_mib")
            claims.append(Claim(source, paper, f"{found:.3f} times", True if found.high < 1 else False if found.low > 1 else None))
        return claims

    def _no_difference(self) -> Claim:
        found = [self.more_bits(*bits) for bits in MORE_BITS]
        told = "; ".join(
            f"moments {states.upper()}, gradients {gradients.upper()}: {_percent(each)}"
            for (states, gradients), each in zip(MORE_BITS, found, strict=True)
        )
        return Claim(
            "Figure 4",
            f"moments and gradients with more bits change virtually nothing under stochastic updates (here: {SAME:.0%} of perplexity)",
            told,
            _same(found, SAME),
        )

    def _meaning(self) -> str:
        ends = {method: exponential(mean(self.losses(method, self.best(method)))).value for method in (STOCHASTIC, O1, NEAREST)}
        found = (
            f"After {self.tokens:,} tokens a GPT ({self.settings.size}) in BF16 with stochastic updates has a perplexity of "
            f"{ends[STOCHASTIC]:.3f} per byte, one in mixed precision (O1) of {ends[O1]:.3f}, and one in BF16 with updates rounded to "
            f"nearest of {ends[NEAREST]:.3f}"
        )
        if not self.on_gpu:
            return f"{found}; savings in time and memory can only be measured on a GPU."
        speed, memory = (self.ratio(STOCHASTIC, O1, what).value for what in ("tokens_per_second", "peak_mib"))
        return f"{found}; stochastic updates run at {speed:.2f} times the speed of O1 with {memory:.2f} times its memory."


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
