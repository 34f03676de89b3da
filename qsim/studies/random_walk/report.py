"""The report of the study `random-walk`: mean numbers of steps compared with the closed form of `walks`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.findings import Findings
from qsim.studies.random_walk import _DISTANCE, EXACT, STOCHASTIC, Settings, schedule_of
from qsim.studies.random_walk.walks import CONSTANT, HALVED, HARMONIC, Array, exact_steps, late, step_moments
from qsim.studies.report import Claim, Picture
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, normal
from qsim.studies.study import Run
from qsim.text.tables import Table

#: What a mean exceeds once in a million times, in standard errors.
_RARE = 4.9


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
        return exact_steps(schedule_of(self.run)(self.run.steps), self.run.levels)

    def row(self, name: str, exact: str) -> list[str]:
        """A row of a table, with the number of steps of exact weights."""
        found, expected = self.measured, self.expected
        ends = f"{found.value / expected - 1:+.2%}", f"{self.late[-1]:.1%}"
        return [name, str(self.run.steps), exact, f"{found:.4g}", f"{expected:.4g}", *ends]

    @cached_property
    def late(self) -> Array:
        """The probability of not having arrived after each number of steps."""
        return late(schedule_of(self.run)(self.run.steps), self.run.levels)


class Written(Findings[Settings]):
    """The results of a study, grouped by way."""

    def begin(self) -> None:
        """Group the results by way."""
        ways: dict[tuple[object, ...], list[Result[Run]]] = defaultdict(list)
        for result in self.results:
            run = result.run
            ways[run.optimizer, run.updates, run.first, run.floor, run.method].append(result)
        found = [WalkGroup(seeds) for seeds in ways.values()]
        self.next_level = [way for way in found if way.run.optimizer == "sgd"]
        self.stochastic = [way for way in found if way.run.optimizer == "adam" and way.run.method == STOCHASTIC]
        self.exact = [way for way in found if way.run.method == EXACT]

    def of(self, updates: str) -> list[WalkGroup]:
        """The ways to the next level with one kind of updates."""
        return [way for way in self.next_level if way.run.updates == updates]

    def parts(self) -> list[str | Table | Picture]:
        """The setting, tables and figures."""
        chosen = self.settings
        counts = {"weights": chosen.weights * chosen.seeds, "adam_weights": chosen.adam_weights * chosen.seeds}
        text = self.text("setting", first=chosen.first * _DISTANCE, **counts)
        return [text, *self._tables(), self.picture("levels", self._levels), self.picture("linear", self._linear)]

    def _tables(self) -> list[Table]:
        rows = [way.row(way.label, str(way.exact)) for way in self.next_level]
        header = ["updates in levels", "step limit", "exact", "stochastic, mean", "closed form", "off", "late at the last step"]
        both = zip(self.stochastic, self.exact, strict=True)
        down = [way.row(f"{way.run.floor * _DISTANCE:.3g}", f"{exact.measured.value:g}") for way, exact in both]
        return [
            Table.of("Steps to the next level", header, rows),
            Table.of("Steps down the linear loss", ["minimum rate", *header[1:]], down),
        ]

    def _levels(self) -> list[Figure]:
        drawn, axes = figures.row(2, width=3.9, height=2.9)
        sides = {"constant updates": self.of(CONSTANT), "decaying updates": self.of(HALVED) + self.of(HARMONIC)}
        for panel, (title, ways) in zip(axes, sides.items(), strict=True):
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
            panel.set(xlabel="step", title=title, ylabel="share not there yet")
        figures.legends(drawn, axes, columns=2)
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
            panel.set(xlabel="step", title=f"minimum rate {way.run.floor * _DISTANCE:.2g}", ylabel="levels to go")
        figures.legends(drawn, axes, columns=2)
        return drawn

    def claims(self) -> list[Claim]:
        """All claims."""
        return [*self._claims_on_levels(), *self._claims_on_a_loss()]

    def _claims_on_levels(self) -> list[Claim]:
        constant, decaying = self.of(CONSTANT), self.of(HALVED) + self.of(HARMONIC)
        ways = self.next_level + self.stochastic
        return [
            self.claim(
                "constant",
                all(abs(way.measured.value - way.exact) <= _RARE * _error(way) for way in constant),
                shown="; ".join(f"{way.run.first:g}: {way.measured:.4g} against {way.exact}" for way in constant),
                least=max(_RARE * _error(way) / way.exact for way in constant),
            ),
            self.claim(
                "decaying",
                all(way.measured.low > way.exact for way in decaying),
                shown="; ".join(f"{way.label}: {way.measured:.4g} against {way.exact}" for way in decaying),
                least=max(2 * normal() * _error(way) / way.exact for way in decaying),
            ),
            self.claim(
                "closed form",
                all(way.off <= _RARE for way in ways),
                count=len(ways),
                off=max(way.off for way in ways),
                difference=max(abs(way.measured.value / way.expected - 1) for way in ways),
                least=max(_RARE * _error(way) / way.expected for way in ways),
            ),
        ]

    def _claims_on_a_loss(self) -> list[Claim]:
        slow, fast, exact = self.stochastic[0], self.stochastic[-1], self.exact[0].measured.value
        later = None if slow.measured.low > exact else False
        # Half of the delay with the low minimum.
        as_fast = None if abs(fast.measured.value - exact) < 0.5 * (slow.measured.value - exact) else False

        def values(way: WalkGroup) -> dict[str, float]:
            times, least = way.measured.value / exact, normal() * _error(way)
            return {"minimum": way.run.floor * _DISTANCE, "times": times, "exact": exact, "least": least}

        return [
            self.claim("slow", later, steps=slow.measured, **values(slow)),
            self.claim("fast", as_fast, steps=fast.measured, **values(fast)),
        ]

    def meaning(self) -> str:
        """The delay by a decaying rate."""
        slow, fast, exact = self.stochastic[0], self.stochastic[-1], self.exact[0]
        steps = {"slow": slow.measured.value, "fast": fast.measured.value, "exact": exact.measured.value}
        return self.text("meaning", times=fast.run.floor / slow.run.floor, **steps)


def _error(way: WalkGroup) -> float:
    """The standard error of a mean, by the closed form."""
    return math.sqrt(step_moments(way.late)[1] / (way.run.weights * len(way.results)))
