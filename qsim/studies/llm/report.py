"""What the models of the study `llm` say: perplexity, time and memory of each method, and what more bits elsewhere change."""

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

#: What is called no difference: one percent of perplexity, and three of speed.
SAME, SAME_SPEED = 0.01, 0.03
#: What is called marginally faster.
MARGINALLY = 1.1
_KEPT = {
    STOCHASTIC: "all in BF16",
    KAHAN: "all in BF16, and what updates lose",
    NEAREST: "all in BF16",
    O1: "FP32; products in BF16 by autocast",
    O2: "weights in BF16; a copy, states and gradients in FP32",
}


class Findings:
    """The results of a study, by what they belong to.

    Args:
        study: The study.
        settings: What was chosen.
        results: Of all runs.
    """

    def __init__(self, study: LLM, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        self._of = {result.run: result for result in results}
        self.on_gpu = all(result["peak_mib"] is not None for result in results)
        self.tokens = settings.steps * settings.batch * settings.context

    def report(self) -> Report:
        """All of it."""
        return Report(
            self.study,
            [self._setting(), self._perplexities(), self._costs(), self._more_bits(), *self._pictures()],
            self._claims(),
            self._meaning(),
        )

    def results(self, method: str, rate: float, states: str = "", gradients: str = "") -> list[Result[Run]]:
        """The results of a method at a rate, one a seed; with its own states and gradients, unless others are named."""
        own = FP32 if method in (O1, O2) else BF16
        runs = [run_of(self.settings, method, rate, seed, states or own, gradients or own) for seed in range(self.settings.seeds)]
        return [self._of[run] for run in runs]

    def losses(self, method: str, rate: float, states: str = "", gradients: str = "") -> list[float]:
        """Nats a byte of held-out text, one a seed."""
        return [float(result["loss"]) for result in self.results(method, rate, states, gradients)]

    def best(self, method: str) -> float:
        """The rate at which a method does best; the paper, too, tunes each one's."""
        means = {rate: mean(self.losses(method, rate)).value for rate in self.settings.rates}
        return min(means, key=lambda rate: means[rate] if math.isfinite(means[rate]) else math.inf)

    def beside(self, method: str, other: str) -> Interval:
        """How many times the perplexity of another method one has, each at its best rate."""
        return exponential(difference(self.losses(method, self.best(method)), self.losses(other, self.best(other))))

    def beside_at(self, rate: float, method: str, other: str) -> Interval:
        """How many times the perplexity of another method one has, both at one rate."""
        return exponential(difference(self.losses(method, rate), self.losses(other, rate)))

    def more_bits(self, states: str, gradients: str) -> Interval:
        """How many times the perplexity of all in BF16 stochastic updates have under other states and gradients."""
        rate = self.settings.rates[-1]
        return exponential(difference(self.losses(STOCHASTIC, rate, states, gradients), self.losses(STOCHASTIC, rate)))

    def cost(self, method: str, what: str) -> list[float]:
        """Tokens a second or memory, of every run."""
        return [float(result[what]) for rate in self.settings.rates for result in self.results(method, rate)]

    def ratio(self, method: str, other: str, what: str) -> Interval:
        """How many times the speed or the memory of another method one has; run by run."""
        return exponential(difference(*([math.log(value) for value in self.cost(name, what)] for name in (method, other))))

    def _setting(self) -> str:
        chosen = self.settings
        data = "the sources of Python's standard library" if chosen.data == "library" else chosen.data
        where = (
            "Peak memory is what torch has handed out at once. "
            if self.on_gpu
            else "This was on a processor, which has no products of its own for BF16: how fast methods are there says nothing of a GPU. "
        )
        return (
            f"A GPT (size {chosen.size}, {chosen.vocabulary} tokens, context {chosen.context}) learns {data}, byte by byte, in "
            f"{chosen.steps} updates of {chosen.batch} sequences in {chosen.micro_batches} micro-batches: {self.tokens:,} "
            "tokens, by AdamW with betas 0.9 and 0.95, weight decay 0.1, gradients clipped at 1, and a learning rate that rises for a "
            f"tenth of the steps and falls along a cosine to a tenth. There are {chosen.seeds} seeds; all methods begin at the same "
            "weights and see the same sequences. Perplexity is that of a byte of held-out text, computed as the method computes. Tokens a "
            "second are those of training, without the steps in which the rate rises, when kernels are compiled, and without validation. "
            f"{where}Intervals hold 95 %, over seeds; those of speed and memory over seeds and rates. The paper's models have 350 million "
            "to 6.7 billion parameters and see 20 to 49 billion tokens, on 8 to 64 A100."
        )

    def _perplexities(self) -> Table:
        rows = []
        for method, label in METHODS.items():
            found = [f"{exponential(mean(self.losses(method, rate))):.3f}" for rate in self.settings.rates]
            rows.append([label, _KEPT[method], *found, "-" if method == O1 else _percent(self.beside(method, O1))])
        header = ["method", "kept in", *(f"rate {rate:g}" for rate in self.settings.rates), "beside O1, each at its best rate"]
        return Table("Validation perplexity of a byte", header, rows)

    def _costs(self) -> Table:
        columns = {"tokens_per_second": ("tokens a second", ".0f")}
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
            ["moments in", "gradients summed in", "perplexity", "beside all in BF16"],
            rows,
        )

    def _pictures(self) -> list[Picture]:
        cost = Picture("cost", "Tokens a second in training, and peak memory. Bars: 95 % over seeds and rates.", self._draw_cost)
        return [
            Picture(
                "perplexity",
                "Perplexity of held-out text beside that of O1 with the same seed. Left: over training, each method at its best rate. "
                "Right: at the end, both at the same rate. Bars: 95 % over seeds.",
                self._draw_perplexity,
            ),
            *([cost] if self.on_gpu else []),
            Picture(
                "more-bits",
                "Perplexity under stochastic updates with moments or gradients in FP32, beside that with all in BF16 and the same seed. "
                "Grey: what is called no difference. Bars: 95 % over seeds.",
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
        over.set_ylabel("perplexity beside\nO1's, in %")
        # Some intervals are so wide that nothing else could be seen, and a method that diverged is nowhere.
        values = [each.value for each in drawn if abs(each.value) < 1e3] or [0.0]
        aside = 0.75 * max(1.0, max(values) - min(values))
        over.set_ylim(min(values) - aside, max(values) + aside)
        end.set_xticks(range(len(self.settings.rates)), [f"{rate:g}" for rate in self.settings.rates])
        end.set_xlim(-0.5, len(self.settings.rates) - 0.5)
        end.set_xlabel("largest learning rate, of both")
        figures.legend(figure, over, columns=3)
        return figure

    def _over_training(self, method: str) -> tuple[list[int], list[Interval]]:
        """After how many steps models were looked at, and the perplexity then beside that of O1, each at its best rate, in percent."""
        own, other = ([result["curve"] for result in self.results(name, self.best(name))] for name in (method, O1))
        steps = [step for step, _ in own[0]]
        ahead = [difference(*([curve[at][1] for curve in curves] for curves in (own, other))) for at in range(len(steps))]
        return steps, [_in_percent(exponential(each)) for each in ahead]

    def _draw_cost(self) -> Figure:
        figure, axes = figures.panels(1, 2, height=2.2, sharey=True)
        wanted: tuple[tuple[str, str, Callable[[float], float]], ...] = (
            ("tokens_per_second", "thousand tokens a second", lambda value: value / 1e3),
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
        axes.set_ylabel("perplexity beside\nall in BF16, in %")
        return figure

    def _claims(self) -> list[Claim]:
        return [self._as_good(), self._nearest_worse(), self._kahan(), *self._speeds(), *self._memories(), self._no_difference()]

    def _as_good(self) -> Claim:
        found = self.beside(STOCHASTIC, O1)
        return Claim(
            "Table 2",
            "BF16 with stochastic updates ends at no higher a perplexity than mixed precision: 14.07 to 14.45 with 350 million parameters, "
            "10.05 to 10.11 with 6.7 billion",
            self._told(STOCHASTIC, O1),
            True if found.high <= 1 else False if found.low > 1 else None,
        )

    def _nearest_worse(self) -> Claim:
        found = self.beside(NEAREST, STOCHASTIC)
        return Claim(
            "Table 2",
            "with updates to nearest it ends at a higher one: 16.38 to 14.07 with 350 million parameters, 11.64 to 10.05 with 6.7 billion",
            self._told(NEAREST, STOCHASTIC),
            True if found.low > 1 else False if found.high < 1 else None,
        )

    def _told(self, method: str, other: str) -> str:
        """One method beside another: each at its best rate, which decides, and both at the same."""
        rates = self.settings.rates if len(self.settings.rates) > 1 else ()
        same = "".join(f"; both at {rate:g}: {_percent(self.beside_at(rate, method, other))}" for rate in rates)
        return f"beside {METHODS[other]}, each at its best rate: {_percent(self.beside(method, other))}{same}"

    def _kahan(self) -> Claim:
        found = self.beside(KAHAN, O1)
        return Claim(
            "Zamirai et al., Revisiting BFloat16 Training, Section 4",
            f"BF16 with Kahan summation matches training with weights in FP32 (here: within {SAME:.0%} of perplexity)",
            f"beside O1: {_percent(found)}",
            _same([found], SAME),
        )

    def _speeds(self) -> list[Claim]:
        o1, o2, nearest = (self.ratio(STOCHASTIC, other, "tokens_per_second") for other in (O1, O2, NEAREST))
        # What a processor says about speed is told, but decides nothing.
        verdicts = (
            True if o1.low > 1 else False if o1.high < 1 else None,
            True if o2.low > 1 and o2.high < MARGINALLY else False if o2.high < 1 or o2.low > MARGINALLY else None,
            _same([nearest], SAME_SPEED),
        )
        papers = (
            ("Table 4", "faster than O1: 1.07 times with 350 million parameters, 1.54 times with 6.7 billion"),
            ("Table 6", f"marginally faster than O2: 1.03 to 1.06 times, 1.3 to 6.7 billion parameters (here: up to {MARGINALLY:g} times)"),
            ("Section 3", f"as fast as BF16 with updates to nearest (here: within {SAME_SPEED:.0%})"),
        )
        return [
            Claim(source, paper, f"{found:.3f} times{'' if self.on_gpu else ', on a processor'}", verdict if self.on_gpu else None)
            for (source, paper), found, verdict in zip(papers, (o1, o2, nearest), verdicts, strict=True)
        ]

    def _memories(self) -> list[Claim]:
        papers = {
            O1: ("Table 5", "less memory than mixed precision: 186 GB to 234 with 350 million parameters, 208 to 298 with 770 million"),
            O2: ("Section 5.2", "the least memory of all, for there are only tensors of BF16: less than O2"),
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
            f"After {self.tokens:,} tokens a GPT ({self.settings.size}) in BF16 with stochastic updates has a perplexity "
            f"of {ends[STOCHASTIC]:.3f} a byte, one in mixed precision (O1) of {ends[O1]:.3f}, and one in BF16 with updates to nearest "
            f"of {ends[NEAREST]:.3f}"
        )
        if not self.on_gpu:
            return f"{found}; what they save in time and memory is measured on a GPU."
        speed, memory = (self.ratio(STOCHASTIC, O1, what).value for what in ("tokens_per_second", "peak_mib"))
        return f"{found}; stochastic updates go at {speed:.2f} times the speed of O1 in {memory:.2f} of its memory."


def _same(ratios: Sequence[Interval], share: float) -> bool | None:
    """Whether all ratios are 1, but for a share."""
    low, high = 1 - share, 1 + share
    if any(ratio.high < low or ratio.low > high for ratio in ratios):
        return False
    return True if all(low <= ratio.low and ratio.high <= high for ratio in ratios) else None


def _in_percent(ratio: Interval) -> Interval:
    """What a ratio is more than 1, in percent."""
    return Interval(*(100 * (bound - 1) for bound in (ratio.value, ratio.low, ratio.high)))


def _percent(ratio: Interval) -> str:
    return f"{_in_percent(ratio):+.2f} %"
