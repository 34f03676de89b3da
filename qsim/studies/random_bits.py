"""Few random bits: the cost of stochastic rounding whose random numbers have only a few bits, as in hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import qsim
from qsim import FivePoint, Quantizer, Stochastic, figures
from qsim.studies.choices import choice
from qsim.studies.learners import nets
from qsim.studies.learners.training import Training
from qsim.studies.report import Claim, Picture, Report, Table
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, difference, mean
from qsim.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL, BIAS, ACCURACY = "fp32", "bias", "accuracy"
_SAMPLES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice("digits", "digits, or a folder with Fashion-MNIST's or CIFAR-10's files")
    formats: tuple[str, ...] = choice(
        ("e4m3", "e4m0"), "formats of inputs and gradients in the backward pass; the paper's hardware has the first"
    )
    bits: tuple[int, ...] = choice((1, 2, 3, 4, 6, 8, 12), "numbers of random bits")
    batch: int = choice(64, "images per update")
    steps: int = choice(200, "number of updates")
    rate: float = choice(0.1, "constant learning rate of plain SGD")
    seeds: int = choice(3, "number of seeds")


@dataclass(frozen=True)
class Run:
    """One net that is trained, or one measurement of a rounding's bias."""

    what: str
    data: str
    format: str
    bits: int
    correction: bool
    batch: int
    steps: int
    rate: float
    seed: int

    @property
    def rounding(self) -> Stochastic:
        """The rounding of this run; with 32 random bits it is exact."""
        return Stochastic(self.bits, correction=self.correction)


class RandomBits(Study[Settings, Run]):
    """Train with few random bits, and measure the bias of the rounding itself."""

    name = "random-bits"
    question = "How many random bits does stochastic rounding need?"
    source = "Liu et al., Training with Fewer Bits, Section 6.2"
    settings = Settings
    run = Run

    def quick(self) -> Settings:
        """Two numbers of bits, few steps."""
        return Settings(formats=("e4m3",), bits=(1, 6), steps=60, seeds=2)

    def full(self) -> Settings:
        """More steps, for a GPU."""
        return Settings(batch=128, steps=1500, seeds=5)

    def runs(self, settings: Settings) -> Sequence[Run]:
        """Every number of bits, with and without correction, for the bias and in training; all bits, and full precision."""
        if not settings.bits or not all(1 <= bits < 32 for bits in settings.bits):
            raise ValueError(f"bits: must be from 1 to 31, because 32 is the reference; got {','.join(map(str, settings.bits)) or 'none'}")
        if not settings.formats:
            raise ValueError("formats: must contain at least one")
        rest = (settings.batch, settings.steps, settings.rate)
        few = [(bits, correction) for bits in settings.bits for correction in (False, True)]
        found = []
        for seed in range(settings.seeds):
            found += [Run(BIAS, "", settings.formats[0], bits, correction, 0, 0, 0.0, seed) for bits, correction in few]
            found.append(Run(ACCURACY, settings.data, FULL, 32, False, *rest, seed))
            found += [
                Run(ACCURACY, settings.data, name, bits, correction, *rest, seed)
                for name in settings.formats
                for bits, correction in (*few, (32, False))
            ]
        return found

    def work(self, run: Run) -> float:
        """Measuring a bias takes almost no time."""
        return 2e4 if run.what == BIAS else run.steps * (100 + run.batch) * (1.0 if run.format == FULL else 3.0)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """The mean error in units of the gap between neighbours, or the accuracy of a net."""
        if run.what == BIAS:
            return {"bias": _bias(run, device)}
        rounds = Quantizer(run.format, run.rounding) if run.format != FULL else None
        points = FivePoint(act_bwd=rounds, grad=rounds) if rounds is not None else None
        how = Training(run.steps, run.batch, loss_scale=nets.in_range(run.format) * run.batch)
        return nets.outcome(run.data, points, how, run.rate, run.seed, device)

    def report(self, settings: Settings, results: Sequence[Result[Run]]) -> Report:
        """Bias and accuracy against random bits."""
        return _Findings(self, settings, results).report()


def _bias(run: Run, device: torch.device) -> float:
    """The mean error over numbers anywhere between 1 and its neighbour, in units of the gap."""
    gap = qsim.format(run.format).epsilon
    place = torch.rand(_SAMPLES, dtype=torch.float64, generator=torch.Generator().manual_seed(run.seed)).to(device)
    rounded = qsim.quantize(1 + place * gap, run.format, rounding=run.rounding, seed=run.seed)
    return float(((rounded - 1) / gap - place).mean())


class _Findings:
    def __init__(self, study: RandomBits, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        self._of = {(r.run.what, r.run.format, r.run.bits, r.run.correction, r.run.seed): r for r in results}

    def report(self) -> Report:
        chosen = self.settings
        text = (
            "With r random bits the probability of rounding up is truncated to a multiple of 2^-r, so that numbers between two "
            "neighbours lose 2^-(r+1) of their gap on average; with correction, it is rounded to the nearest multiple, and they lose "
            f"nothing. Both are measured on {_SAMPLES} numbers per seed. Then nets for {chosen.data} are trained for {chosen.steps} "
            f"steps of plain SGD with {chosen.batch} images each at a learning rate of {chosen.rate:g}: the backward pass rounds inputs "
            f"and gradients, which a loss scale keeps in range. There are {chosen.seeds} seeds; intervals are 95 %."
        )
        pictures = [
            Picture(
                "bias",
                "Mean error of the rounding in units of the gap between neighbours. Bars: 95 % intervals over seeds.",
                self._draw_bias,
            ),
            Picture("accuracy", "Accuracy relative to 32 random bits. Bars: 95 % intervals over seeds.", self._draw_accuracy),
        ]
        return Report(
            self.study, [text, self._biases(), *map(self._accuracies, chosen.formats), *pictures], self._claims(), self._meaning()
        )

    def bias(self, bits: int, correction: bool) -> Interval:
        """The mean error, in units of the gap."""
        name = self.settings.formats[0]
        return mean([float(self._of[BIAS, name, bits, correction, seed]["bias"]) for seed in range(self.settings.seeds)])

    def accuracies(self, name: str, bits: int, correction: bool) -> list[float]:
        return [float(self._of[ACCURACY, name, bits, correction, seed]["accuracy"]) for seed in range(self.settings.seeds)]

    def lost(self, name: str, bits: int, correction: bool) -> Interval:
        """The accuracy lost to few random bits."""
        return difference(self.accuracies(name, 32, False), self.accuracies(name, bits, correction))

    def _biases(self) -> Table:
        rows = [
            [str(bits), f"{-(0.5 ** (bits + 1)):.3g}", f"{self.bias(bits, False):.3g}", f"{self.bias(bits, True):.1e}"]
            for bits in self.settings.bits
        ]
        return Table("Mean error in units of the gap", ["random bits", "truncated, in theory", "truncated", "corrected"], rows)

    def _accuracies(self, name: str) -> Table:
        rows = [
            [str(bits), *(f"{mean(self.accuracies(name, bits, correction)):.1%}" for correction in (False, True))]
            for bits in self.settings.bits
        ]
        rows.append(["32", f"{mean(self.accuracies(name, 32, False)):.1%}", "the same"])
        return Table(f"Accuracy, backward pass in {name.upper()}", ["random bits", "truncated", "corrected"], rows)

    def _draw_bias(self) -> Figure:
        figure, (axes,) = figures.panels(1, 1, width=4.2, height=2.8)
        bits = self.settings.bits
        for look, (correction, label) in zip(figures.LOOKS, ((False, "truncated"), (True, "corrected")), strict=False):
            figures.band(axes, bits, [self.bias(count, correction) for count in bits], look, label)
        axes.plot(bits, [-(0.5 ** (count + 1)) for count in bits], label=r"$-2^{-(r+1)}$", **figures.REFERENCE())
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set_xticks(bits)
        axes.set_xlabel("random bits r")
        axes.set_ylabel("mean error in gaps")
        figures.legend(figure, axes, columns=3)
        return figure

    def _draw_accuracy(self) -> Figure:
        names, bits = self.settings.formats, self.settings.bits
        figure, axes = figures.panels(1, len(names), sharey=True)
        for panel, name in zip(axes, names, strict=True):
            for place, (look, correction, label) in enumerate(zip(figures.LOOKS, (False, True), ("truncated", "corrected"), strict=False)):
                lost = [self.lost(name, count, correction) for count in bits]
                points = [Interval(-100 * each.value, -100 * each.high, -100 * each.low) for each in lost]
                figures.band(panel, [count * 1.05**place for count in bits], points, look, label)
            panel.axhline(0, **figures.REFERENCE())
            panel.set_xscale("log", base=2)
            panel.set_xticks(bits, [str(count) for count in bits])
            panel.minorticks_off()
            panel.set_xlabel("random bits")
            panel.set_title(f"backward pass in {name.upper()}")
        axes[0].set_ylabel("accuracy vs. 32 bits, in %")
        figures.legend(figure, axes[0], columns=2)
        return figure

    def _claims(self) -> list[Claim]:
        name, six = self.settings.formats[0], min(self.settings.bits, key=lambda bits: abs(bits - 6))
        least = self.settings.bits[0]
        lost, bias, corrected = self.lost(name, six, False), self.bias(least, False), self.bias(least, True)
        return [
            Claim(
                "Section 6.2",
                f"6 random bits are enough for stochastic rounding to FP8 (here: {six} bits lose less than 1 % of accuracy)",
                f"{name}, {six} bits: {-lost.value:+.1%} [{-lost.high:+.1%}, {-lost.low:+.1%}] accuracy relative to 32 bits",
                True if lost.high < 0.01 else False if lost.low > 0.01 else None,
            ),
            Claim(
                "this library's contract",
                "truncated to r bits, a number loses 2^-(r+1) gaps on average",
                f"{least} random bit(s): {bias:.4f}",
                # For a million errors below one gap, the mean is within 1e-3, five standard deviations.
                abs(bias.value + 0.5 ** (least + 1)) < 1e-3,
            ),
            Claim(
                "this library's contract",
                "with correction, it loses nothing on average",
                f"{least} random bit(s): {corrected:.1e}",
                abs(corrected.value) < 1e-3,
            ),
        ]

    def _meaning(self) -> str:
        name = self.settings.formats[0]
        enough = [bits for bits in self.settings.bits if self.lost(name, bits, False).high < 0.01]
        if not enough:
            return f"No tested number of random bits reliably loses less than 1 % of accuracy in {name.upper()}."
        return (
            f"In {name.upper()} {min(enough)} random bit(s) already cost less than 1 % of accuracy; each rounding then has a bias of "
            f"{self.bias(min(enough), False).value:.2g} gaps, and with correction one of {self.bias(min(enough), True).value:.0e}."
        )
