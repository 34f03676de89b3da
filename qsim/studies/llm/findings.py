"""Losses, speed and memory of the study `llm`, by method and learning rate, with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qsim.studies.findings import Findings
from qsim.studies.learners.gpt_training import STOCHASTIC
from qsim.studies.learners.text import VOCABULARY
from qsim.studies.llm import BITS, COST, PERPLEXITY, Settings, equal, made
from qsim.studies.llm.training import O1
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, difference, exponential, mean, ratio
from qsim.studies.study import Run

#: Differences up to this count as none: one percent of perplexity.
SAME = 0.01


class LanguageFindings(Findings[Settings]):
    """The results of a study, grouped by method."""

    def begin(self) -> None:
        """Note what was measured, and the words for it."""
        chosen = self.settings
        self.of_perplexity, self.of_bits, self.of_cost = (what in chosen.measures for what in (PERPLEXITY, BITS, COST))
        self.unit = "byte" if chosen.tokens == VOCABULARY else "token"
        self.on_gpu = self.of_cost and all(result["peak_mib"] is not None for result in self.results)
        self.several = len(chosen.size) > 1
        self.tokens = chosen.steps * chosen.batch * chosen.context

    def trained(self, method: str, rate: float, states: str = "", gradients: str = "", size: str = "") -> list[Result[Run]]:
        """The results of a method at a rate, one per judged seed; with its own states and gradients, unless others are named."""
        found = self.seeded(**made(self.settings, method, rate, states, gradients, size))
        return [result for result in found if result.run.seed in self.settings.judged]

    def rates(self, method: str) -> Sequence[float]:
        """The rates at which a method was judged."""
        tuned = self.settings.rate_of
        return [tuned[method]] if tuned else self.settings.rates

    def tried(self, method: str, rate: float) -> list[float]:
        """The losses of a method at a rate with the seeds that all rates have."""
        if not self.settings.tuned:
            return self.losses(method, rate)
        return [float(self.seeded(**made(self.settings, method, rate))[0]["loss"])]

    def losses(self, method: str, rate: float, states: str = "", gradients: str = "") -> list[float]:
        """Nats per token of held-out text, one per seed."""
        return [float(result["loss"]) for result in self.trained(method, rate, states, gradients)]

    def best(self, method: str) -> float:
        """The rate at which a method does best; the paper also tunes the rate of each method."""
        means = {rate: mean(self.losses(method, rate)).value for rate in self.rates(method)}
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

    def equal(self, what: str) -> Interval:
        """The ratio of perplexities with stochastic updates: with more updates or larger batches, relative to as many as O1 has."""
        return exponential(difference(self.over_seeds("loss", **equal(self.settings, what)), self.losses(STOCHASTIC, self.settings.middle)))

    def cost(self, method: str, what: str, size: str = "") -> list[float]:
        """Tokens per second, or memory, of every run."""
        return [float(result[what]) for rate in self.rates(method) for result in self.trained(method, rate, size=size)]

    def ratio(self, method: str, other: str, what: str, size: str = "") -> Interval:
        """The ratio of two methods' speed or memory, run by run."""
        return ratio(self.cost(method, what, size), self.cost(other, what, size))

    def grows(self) -> Interval:
        """The speed of stochastic updates relative to O1 with the largest model, divided by that with the smallest."""
        least, *_, most = (
            np.divide(self.cost(STOCHASTIC, "tokens_per_second", size), self.cost(O1, "tokens_per_second", size))
            for size in self.settings.size
        )
        return ratio(most, least)


def excess_percent(ratio: Interval) -> Interval:
    """The excess of a ratio over 1, in percent."""
    return Interval(*(100 * (bound - 1) for bound in (ratio.value, ratio.low, ratio.high)))


def excess_text(ratio: Interval) -> str:
    """The excess of a ratio over 1, in percent, as text."""
    return f"{excess_percent(ratio):+.2f} %"
