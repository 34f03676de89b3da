"""The report of the study `random-walk`: mean numbers of steps compared with the closed form of `walks`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from qsim.plot import figures
from qsim.studies.random_walk import _DISTANCE, EXACT, STOCHASTIC, RandomWalkStudy, Run, Settings
from qsim.studies.random_walk.walks import CONSTANT, HALVED, HARMONIC, Array, exact_steps, late, step_moments
from qsim.studies.report import Claim, Picture, Report
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, confidence_text, normal
from qsim.text.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What a mean exceeds once in a million times, in standard errors.
_RARE = 4.9
_WITHIN = "yes if all are within 4.9 standard errors of it, which chance exceeds once in a million times, no if not"


@dataclass(frozen=True)
class WalkGroup:
    """The weights of all seeds that walk in one way.

    Attributes:
        results: The result of each seed.
    """

    results: Sequence[Result[Run]]

    @property
    def run(self) -> Run:
        """The run of the first seed."""
        return self.results[0].run

    @property
    def label(self) -> str:
        """A description of the updates."""
        run = self.run
        if run.updates == CONSTANT:
            return f"1/{1 / run.first:g}, constant"
        if run.updates == HALVED:
            return f"1/2, halved down to 1/{1 / run.floor:g}"
        return "1/2, 1/4, 1/6, …" if run.updates == HARMONIC else f"decaying down to {run.floor * _DISTANCE:.2g}"

    @property
    def measured(self) -> Interval:
        """The mean number of steps, where late weights count as arriving at the last step."""
        mean = float(np.mean([result["mean"] for result in self.results]))
        variance = float(np.mean([result["variance"] for result in self.results]))
        half = normal() * math.sqrt(variance / (self.run.weights * len(self.results)))
        return Interval(mean, mean - half, mean + half)

    @property
    def expected(self) -> float:
        """The same by the closed form."""
        return step_moments(self.late)[0]

    @property
    def off(self) -> float:
        """The deviation of the measured mean in its standard errors, which also come from the closed form."""
        return abs(self.measured.value - self.expected) / _error(self)

    @property
    def exact(self) -> int:
        """The number of steps of exact weights."""
        return exact_steps(self.run.schedule(self.run.steps), self.run.levels)

    @cached_property
    def late(self) -> Array:
        """The probability of not having arrived after each number of steps."""
        return late(self.run.schedule(self.run.steps), self.run.levels)


class Findings:
    """The results of a study, grouped by way."""

    def __init__(self, study: RandomWalkStudy, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        ways: dict[tuple[object, ...], list[Result[Run]]] = {}
        for result in results:
            run = result.run
            ways.setdefault((run.optimizer, run.updates, run.first, run.floor, run.method), []).append(result)
        found = [WalkGroup(seeds) for seeds in ways.values()]
        self.next_level = [way for way in found if way.run.optimizer == "sgd"]
        self.stochastic = [way for way in found if way.run.optimizer == "adam" and way.run.method == STOCHASTIC]
        self.exact = [way for way in found if way.run.method == EXACT]

    def of(self, updates: str) -> list[WalkGroup]:
        """The ways to the next level with one kind of updates."""
        return [way for way in self.next_level if way.run.updates == updates]

    def report(self) -> Report:
        """The complete report."""
        return Report(self.study, [self._setting(), *self._tables(), *self._pictures()], self._claims(), self._meaning())

    def _setting(self) -> str:
        chosen = self.settings
        return (
            "To the next level: independent bfloat16 weights under plain SGD, with updates smaller than the distance between levels; "
            f"{chosen.weights * chosen.seeds} of them or more for each kind of update. Down a linear loss: weights from 1.75 down by "
            f"{chosen.levels} levels of 2^-7 each, under Adam, for which a constant gradient makes updates equal to the learning rate. "
            f"It decays linearly from {chosen.first * _DISTANCE:.4g} towards zero at step {chosen.length}, but not below its minimum; "
            f"{chosen.adam_weights * chosen.seeds} weights. The paper does not give its constants: these were fitted to the numbers of "
            "steps that it reports, 4600, 7700 and 4600, so the claims show that such constants exist, and the effect of a minimum "
            "rate, but do not confirm any number. In means, weights that have not arrived at the last step count as arriving there, "
            f"also in the closed form (the page Derivations of qsim's site has it). Intervals are {confidence_text()}, over weights."
        )

    def _tables(self) -> list[Table]:
        rows = [
            [way.label, str(way.run.steps), str(way.exact), f"{way.measured:.4g}", f"{way.expected:.4g}",
             f"{way.measured.value / way.expected - 1:+.2%}", f"{way.late[-1]:.1%}"]
            for way in self.next_level
        ]  # fmt: skip
        header = ["updates in levels", "step limit", "exact", "stochastic, mean", "closed form", "off", "late at the last step"]
        down = [
            [f"{way.run.floor * _DISTANCE:.3g}", str(way.run.steps), f"{exact.measured.value:g}", f"{way.measured:.4g}",
             f"{way.expected:.4g}", f"{way.measured.value / way.expected - 1:+.2%}", f"{way.late[-1]:.1%}"]
            for way, exact in zip(self.stochastic, self.exact, strict=True)
        ]  # fmt: skip
        return [
            Table.of("Steps to the next level", header, rows),
            Table.of("Steps down the linear loss", ["minimum rate", *header[1:]], down),
        ]

    def _pictures(self) -> list[Picture]:
        return [
            Picture(
                "levels",
                "Share of weights that have not reached the next level. Lines: closed form; marks: measured; dotted: when exact weights "
                "arrive.",
                self._levels,
            ),
            Picture(
                "linear",
                "Down the linear loss: levels still to go, with exact and with stochastic updates (mean, and the middle 90 % of weights).",
                self._linear,
            ),
        ]

    def _levels(self) -> list[Figure]:
        drawn, axes = figures.row(2, width=3.9, height=2.9)
        for panel, ways, title in zip(
            axes,
            (self.of(CONSTANT), self.of(HALVED) + self.of(HARMONIC)),
            ("constant updates", "decaying updates"),
            strict=True,
        ):
            for way, look in zip(ways, figures.LOOKS, strict=False):
                steps = np.arange(1, way.run.steps + 1)
                expected = way.late[1:]
                shown = expected > 1e-3
                panel.plot(steps[shown], expected[shown], color=look.color)
                curve = np.array([point for point in way.results[0]["curve"] if point[1] > 1e-3])
                every = max(1, len(curve) // 12)
                panel.plot(curve[::every, 0], curve[::every, 1], label=way.label, **look(linestyle=""))
                panel.axvline(way.exact, color=look.color, linestyle=":", linewidth=1.2)
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_ylim(1e-3, 1.3)
            figures.plain_numbers(panel.xaxis)
            figures.plain_numbers(panel.yaxis)
            panel.set_xlabel("step")
            panel.set_title(title)
            panel.set_ylabel("share not there yet")
        for figure, panel in zip(drawn, axes, strict=True):
            figures.legend(figure, panel, columns=2)
        return drawn

    def _linear(self) -> list[Figure]:
        drawn, axes = figures.row(len(self.stochastic))
        for panel, way, exact in zip(axes, self.stochastic, self.exact, strict=True):
            for shown, look, label in ((exact, figures.LOOKS[0], "exact"), (way, figures.LOOKS[1], "stochastic")):
                steps, _, mean, low, high = np.array(shown.results[0]["curve"]).T
                panel.plot(steps, mean, label=label, markevery=6, **look())
                panel.fill_between(steps, low, high, color=look.color, alpha=0.18, linewidth=0)
            panel.axvline(exact.exact, label="exact weights arrive", **figures.REFERENCE())
            panel.axvline(way.measured.value, label="stochastic ones, on average", **figures.REFERENCE(linestyle=(0, (5, 2))))
            panel.set_xlim(0, min(way.run.steps, 3 * exact.exact))
            panel.set_xlabel("step")
            panel.set_title(f"minimum rate {way.run.floor * _DISTANCE:.2g}")
            panel.set_ylabel("levels to go")
        for figure, panel in zip(drawn, axes, strict=True):
            figures.legend(figure, panel, columns=2)
        return drawn

    def _claims(self) -> list[Claim]:
        return [*self._claims_on_levels(), *self._claims_on_a_loss()]

    def _claims_on_levels(self) -> list[Claim]:
        constant, late_ones = self.of(CONSTANT), self.of(HALVED) + self.of(HARMONIC)
        ways = self.next_level + self.stochastic
        return [
            Claim(
                "Section 2.2, first example",
                "constant updates reach the next level after as many steps on average as exact ones: updates of 1/2, after 2",
                "; ".join(f"{way.run.first:g}: {way.measured:.4g} against {way.exact}" for way in constant),
                all(abs(way.measured.value - way.exact) <= _RARE * _error(way) for way in constant),
                test="mean number of steps over the weights",
                rule=_WITHIN,
                power=f"{max(_RARE * _error(way) / way.exact for way in constant):.2%} of the steps",
            ),
            Claim(
                "Section 2.2, first example",
                "decaying updates take longer than exact ones",
                "; ".join(f"{way.label}: {way.measured:.4g} against {way.exact}" for way in late_ones),
                all(way.measured.low > way.exact for way in late_ones),
                test="the same",
                rule="yes if all intervals are above the number of exact steps, no if not",
                power=f"{max(2 * normal() * _error(way) / way.exact for way in late_ones):.1%} of the steps",
            ),
            Claim(
                "this library's derivation",
                "the mean number of steps follows from the updates alone",
                f"of {len(ways)} means, the largest deviation is {max(way.off for way in ways):.1f} standard errors, and the largest "
                f"difference {max(abs(way.measured.value / way.expected - 1) for way in ways):.2%}",
                all(way.off <= _RARE for way in ways),
                test="the same, minus the mean of the closed form",
                rule=_WITHIN,
                power=f"{max(_RARE * _error(way) / way.expected for way in ways):.2%} of the steps",
            ),
        ]

    def _claims_on_a_loss(self) -> list[Claim]:
        slow, fast = self.stochastic[0], self.stochastic[-1]
        exact = self.exact[0]
        return [
            Claim(
                "Section 2.2, second example",
                "with a decaying rate stochastic rounding converges later than FP32: after 7700 steps instead of 4600, 1.7 times",
                f"minimum rate {slow.run.floor * _DISTANCE:.2g}: {slow.measured:.0f} instead of {exact.measured.value:.0f}, "
                f"{slow.measured.value / exact.measured.value:.2f} times, with constants fitted to the paper's steps",
                None if slow.measured.low > exact.measured.value else False,
                test="the same, down the linear loss",
                rule="no if it is not later; never yes, because the constants, which the paper does not give, were fitted to these numbers",
                power=f"{normal() * _error(slow):.0f} steps",
            ),
            Claim(
                "Section 2.2, second example",
                "with a higher minimum rate it converges as fast as FP32 did: after 4600 steps",
                f"minimum rate {fast.run.floor * _DISTANCE:.2g}: {fast.measured:.0f}, "
                f"{fast.measured.value / exact.measured.value:.2f} times as many as FP32 with the low minimum; fitted as well",
                # Half of the delay with the low minimum.
                None if abs(fast.measured.value - exact.measured.value) < 0.5 * (slow.measured.value - exact.measured.value) else False,
                test="the same",
                rule="no if more than half of the delay remains; never yes, as before",
                power=f"{normal() * _error(fast):.0f} steps",
            ),
        ]

    def _meaning(self) -> str:
        slow, fast, exact = self.stochastic[0], self.stochastic[-1], self.exact[0]
        return (
            "With constant updates, stochastic rounding takes no longer on average than exact arithmetic, but with a decaying learning "
            f"rate, weights that fall behind stay behind. Down a linear loss they take {slow.measured.value:.0f} steps instead of "
            f"{exact.measured.value:.0f}, and {fast.measured.value:.0f} if the minimum rate is {fast.run.floor / slow.run.floor:.1f} times "
            "as high."
        )


def _error(way: WalkGroup) -> float:
    """The standard error of a mean, by the closed form."""
    return math.sqrt(step_moments(way.late)[1] / (way.run.weights * len(way.results)))
