"""A grid of formats: how many bits, and which, a net needs if every rounding of its layers uses the same format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import qsim
from qsim import FivePoint, Quantizer, figures, scaling
from qsim.studies.choices import choice
from qsim.studies.learners import nets
from qsim.studies.learners.training import Training
from qsim.studies.report import Claim, Picture, Report, Table
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, difference, mean
from qsim.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = "fp32"


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice("digits", "digits, or a folder with Fashion-MNIST's or CIFAR-10's files")
    exponents: tuple[int, ...] = choice((1, 2, 3, 4, 5), "exponent bits")
    mantissas: tuple[int, ...] = choice((0, 1, 2, 3), "mantissa bits")
    roundings: tuple[str, ...] = choice(("stochastic", "nearest"), "roundings of the backward pass")
    batch: int = choice(64, "images per update")
    steps: int = choice(150, "number of updates")
    rate: float = choice(0.1, "constant learning rate of plain SGD")
    seeds: int = choice(3, "number of seeds")

    @property
    def formats(self) -> list[str]:
        """The names of the grid's formats."""
        return [f"e{exponent}m{mantissa}" for exponent in self.exponents for mantissa in self.mantissas]


@dataclass(frozen=True)
class Run:
    """One net that is trained in one format."""

    data: str
    format: str
    rounding: str
    batch: int
    steps: int
    rate: float
    seed: int

    @property
    def points(self) -> FivePoint | None:
        """All five points, with per-tensor scales; `rounding` is that of the backward pass, the forward pass rounds to nearest."""
        if self.format == FULL:
            return None
        there = Quantizer(self.format, "nearest", scale=scaling.Tensor())
        back = Quantizer(self.format, self.rounding, scale=scaling.Tensor())
        return FivePoint(there, there, act_bwd=back, weight_bwd=back, grad=back)


class Formats(Study[Settings, Run]):
    """Train a net in every format of a grid."""

    name = "formats"
    question = "How many bits does a net need, and where: exponent or mantissa?"
    source = "no paper: the frontier of bits against accuracy"
    settings = Settings
    run = Run

    def quick(self) -> Settings:
        """Four formats, few steps."""
        return Settings(exponents=(2, 4), mantissas=(0, 2), steps=60, seeds=2)

    def full(self) -> Settings:
        """More steps, for a GPU."""
        return Settings(batch=128, steps=1500, seeds=5)

    def runs(self, settings: Settings) -> Sequence[Run]:
        """Every format with every rounding, and full precision."""
        rest = (settings.batch, settings.steps, settings.rate)
        return [
            Run(settings.data, name, rounding, *rest, seed)
            for seed in range(settings.seeds)
            for name, rounding in ((FULL, "nearest"), *((name, how) for name in settings.formats for how in settings.roundings))
        ]

    def work(self, run: Run) -> float:
        """Stochastic rounding takes longer."""
        return run.steps * (100 + run.batch) * (1.0 if run.format == FULL else 4.0 if run.rounding == "nearest" else 6.0)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train the net, and test it with its rounding."""
        return nets.outcome(run.data, run.points, Training(run.steps, run.batch), run.rate, run.seed, device)

    def report(self, settings: Settings, results: Sequence[Result[Run]]) -> Report:
        """The grid, and its frontier."""
        return _Findings(self, settings, results).report()


class _Findings:
    def __init__(self, study: Formats, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        self._of = {(result.run.format, result.run.rounding, result.run.seed): result for result in results}
        self.bits = sorted({qsim.format(name).bits for name in settings.formats})

    def report(self) -> Report:
        chosen = self.settings
        text = (
            f"Nets for {chosen.data} are trained for {chosen.steps} steps of plain SGD with {chosen.batch} images each, at a learning "
            f"rate of {chosen.rate:g}; there are {chosen.seeds} seeds. All five points of every layer use one format with per-tensor "
            "scales: with round-to-nearest in the forward pass, and the table's rounding in the backward pass. Accuracy is that of the "
            f"rounding net on test images; in full precision it is {mean(self.accuracies(FULL, 'nearest')):.1%}. Intervals are 95 %, "
            "over seeds. The best format of a width is chosen by the same test accuracy that is then reported for it, so this number is "
            "slightly optimistic, more so for widths with many formats."
        )
        picture = Picture("frontier", "The best format of each width. Bars: 95 % intervals over seeds.", self._draw)
        return Report(self.study, [text, *map(self._grid, chosen.roundings), self._frontier(), picture], self._claims(), self._meaning())

    def accuracies(self, name: str, rounding: str) -> list[float]:
        return [float(self._of[name, rounding, seed]["own_accuracy"]) for seed in range(self.settings.seeds)]

    def best(self, bits: int, rounding: str) -> str:
        """The format of a width with the highest accuracy under a rounding."""
        names = [name for name in self.settings.formats if qsim.format(name).bits == bits]
        return max(names, key=lambda name: mean(self.accuracies(name, rounding)).value)

    def needed(self, rounding: str) -> int | None:
        """The fewest bits with which a net certainly loses less than one percent of accuracy: the whole interval is below."""
        for bits in self.bits:
            if self.lost(self.best(bits, rounding), rounding).high < 0.01:
                return bits
        return None

    def lost(self, name: str, rounding: str) -> Interval:
        """The accuracy lost to a format."""
        return difference(self.accuracies(FULL, "nearest"), self.accuracies(name, rounding))

    def _grid(self, rounding: str) -> Table:
        rows = [
            [
                f"E{exponent}",
                *(f"{mean(self.accuracies(f'e{exponent}m{mantissa}', rounding)).value:.1%}" for mantissa in self.settings.mantissas),
            ]
            for exponent in self.settings.exponents
        ]
        return Table(f"Accuracy, {rounding}", ["exponent", *(f"M{mantissa}" for mantissa in self.settings.mantissas)], rows)

    def _frontier(self) -> Table:
        rows = [
            [str(bits), *(f"{self.best(bits, rounding).upper()}: {mean(self.accuracies(self.best(bits, rounding), rounding)):.1%}"
                          for rounding in self.settings.roundings)]
            for bits in self.bits
        ]  # fmt: skip
        return Table("The best format of each width", ["bits", *self.settings.roundings], rows)

    def _draw(self) -> Figure:
        figure, axes = figures.panels(1, 1, width=4.2, height=3.0)
        for place, (look, rounding) in enumerate(zip(figures.LOOKS, self.settings.roundings, strict=False)):
            points = [mean([100 * value for value in self.accuracies(self.best(bits, rounding), rounding)]) for bits in self.bits]
            figures.band(axes[0], [bits + 0.08 * place for bits in self.bits], points, look, rounding)
        first = self.settings.roundings[0]
        full = 100 * mean(self.accuracies(FULL, "nearest")).value
        axes[0].axhline(full, label="full precision", **figures.REFERENCE())
        axes[0].set_xticks(self.bits, [f"{bits}\n{self.best(bits, first).upper()}" for bits in self.bits])
        axes[0].set_xlabel(f"bits of the format, and the best one ({first})")
        axes[0].set_ylabel("accuracy in %")
        figures.legend(figure, axes[0], columns=3)
        return figure

    def _claims(self) -> list[Claim]:
        needed = {rounding: self.needed(rounding) for rounding in self.settings.roundings}
        told = ", ".join(f"{rounding} {bits or 'more than were tried'}" for rounding, bits in needed.items())
        first = self.settings.roundings[0]
        ends = [self.best(bits, first) for bits in (self.bits[-1], self.bits[0])]
        gain = difference(*(self.accuracies(name, first) for name in ends))
        return [
            Claim(
                "expected",
                "more bits, more accuracy",
                f"{first}, from {ends[1].upper()} to {ends[0].upper()}: {gain:+.1%}",
                True if gain.low > 0 else False if gain.high < 0 else None,
            ),
            Claim(
                "expected",
                "8 bits lose less than 1 % of accuracy",
                f"bits needed: {told}",
                self._eight_are_enough(needed),
            ),
        ]

    def _eight_are_enough(self, needed: Mapping[str, int | None]) -> bool | None:
        if all(bits is not None and bits <= 8 for bits in needed.values()):
            return True
        worse = 8 in self.bits and any(self.lost(self.best(8, rounding), rounding).low > 0.01 for rounding in needed)
        return False if worse else None

    def _meaning(self) -> str:
        first = self.settings.roundings[0]
        bits = self.needed(first)
        if bits is None:
            return f"No format in this grid reliably loses less than 1 % of accuracy, with {first} rounding in the backward pass."
        return (
            f"Formats lose less than 1 % of accuracy from {bits} bits on ({self.best(bits, first).upper()}), with {first} "
            "rounding in the backward pass."
        )
