"""One point at a time: the cost of each of a layer's five roundings, by format and rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qsim import FivePoint, Quantizer, scaling
from qsim.plot import figures
from qsim.studies.choices import choice
from qsim.studies.learners import nets
from qsim.studies.learners.images import described
from qsim.studies.learners.training import Training
from qsim.studies.report import Claim, Picture, Report
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, above, confidence_text, describe_bars, difference, mean
from qsim.studies.study import Study
from qsim.text.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The five points in the order of a step, and their names in the report.
POINTS = {
    "act": "input, forward",
    "weight": "weight, forward",
    "act_bwd": "input, backward",
    "weight_bwd": "weight, backward",
    "grad": "gradient",
}
NONE = "none"


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice("digits", "digits, or a folder with Fashion-MNIST's or CIFAR-10's files")
    formats: tuple[str, ...] = choice(("e3m0", "e2m1", "e4m1", "e4m3"), "formats of the rounded point, from coarse to fine")
    roundings: tuple[str, ...] = choice(("nearest", "stochastic"), "roundings of the point")
    batch: int = choice(64, "images per update")
    steps: int = choice(200, "number of updates")
    rate: float = choice(0.1, "constant learning rate of plain SGD")
    seeds: int = choice(4, "number of seeds")


@dataclass(frozen=True)
class Run:
    """One net that is trained, with one point rounded or none."""

    data: str
    point: str
    format: str
    rounding: str
    batch: int
    steps: int
    rate: float
    seed: int

    @property
    def points(self) -> FivePoint | None:
        """The points of every layer. A scale per tensor brings it into the format's range, so that only the bits are compared."""
        if self.point == NONE:
            return None
        chosen: dict[str, Any] = {self.point: Quantizer(self.format, self.rounding, scale=scaling.PerTensor())}
        return FivePoint(**{"act_bwd": None, "weight_bwd": None, **chosen})


class PointsStudy(Study[Settings, Run]):
    """Train a net with one of its five points rounded."""

    name = "points"
    question = "Which of the five roundings of a layer hurts?"
    source = "Liu et al., Training with Fewer Bits, Section 3"
    settings = Settings
    run = Run

    def quick(self) -> Settings:
        """One format, few steps."""
        return Settings(formats=("e2m1",), steps=60, seeds=2)

    def full(self) -> Settings:
        """More steps, for a GPU."""
        return Settings(batch=128, steps=1500, seeds=5)

    def runs(self, settings: Settings) -> Sequence[Run]:
        """Every point in every format and rounding, and full precision."""
        if not {"stochastic", "nearest"} <= set(settings.roundings) or not settings.formats:
            raise ValueError("roundings and formats: must be stochastic and nearest, and at least one format")
        rest = (settings.batch, settings.steps, settings.rate)
        return [
            Run(settings.data, point, name, rounding, *rest, seed)
            for seed in range(settings.seeds)
            for point, name, rounding in (
                (NONE, "fp32", "nearest"),
                *((point, name, rounding) for point in POINTS for name in settings.formats for rounding in settings.roundings),
            )
        ]

    def work(self, run: Run) -> float:
        """Stochastic rounding takes longer."""
        return run.steps * (100 + run.batch) * (1.0 if run.point == NONE else 2.0 if run.rounding == "nearest" else 3.0)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train the net, and test it with its rounding."""
        return nets.outcome(run.data, run.points, Training(run.steps, run.batch), run.rate, run.seed, device)

    def report(self, settings: Settings, results: Sequence[Result[Run]]) -> Report:
        """The increase of the loss for each point."""
        return _Findings(self, settings, results).report()


class _Findings:
    def __init__(self, study: PointsStudy, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        self._of = {(result.run.point, result.run.format, result.run.rounding, result.run.seed): result for result in results}

    def report(self) -> Report:
        chosen = self.settings
        text = (
            f"{described(chosen.data)}, in {chosen.steps} steps of plain SGD with {chosen.batch} images each, at a learning rate of "
            f"{chosen.rate:g}; there are {chosen.seeds} seeds. One point of every layer is rounded, with a scale per tensor. The "
            "loss is that of the rounding net on test images; the increase that a point causes is computed seed by seed. Intervals are "
            f"{confidence_text()}, over seeds. Sections 3.1 and 3.3 are about the bias of a gradient, which the study `gradient-variance` "
            "measures; here are the consequences in training. Section 3.2, that SGD can converge near a stationary point if only weights "
            "are rounded, is not graded: near has no number."
        )
        pictures = [Picture("points", f"Increase of the test loss by one rounding. {describe_bars()}", self._draw)]
        return Report(
            self.study, [text, *pictures, *(self._table(rounding) for rounding in chosen.roundings)], self._claims(), self._meaning()
        )

    def losses(self, point: str, name: str, rounding: str, what: str = "own_loss") -> list[float]:
        return [float(self._of[point, name, rounding, seed][what]) for seed in range(self.settings.seeds)]

    def added(self, point: str, name: str, rounding: str) -> Interval:
        """The increase of the test loss when a point is rounded."""
        return difference(self.losses(point, name, rounding), self.losses(NONE, "fp32", "nearest"))

    def _table(self, rounding: str) -> Table:
        rows = [
            [label, *(f"{self.added(point, name, rounding):+.3f}" for name in self.settings.formats)] for point, label in POINTS.items()
        ]
        full = mean(self.losses(NONE, "fp32", "nearest")).value
        return Table.of(f"Added to a test loss of {full:.3f}, {rounding}", ["point", *map(str.upper, self.settings.formats)], rows)

    def _draw(self) -> list[Figure]:
        drawn, axes = figures.row(len(self.settings.roundings))
        names = self.settings.formats
        for panel, rounding in zip(axes, self.settings.roundings, strict=True):
            for place, (look, (point, label)) in enumerate(zip(figures.LOOKS, POINTS.items(), strict=False)):
                aside = [at + 0.13 * (place - 2) for at in range(len(names))]
                figures.band(panel, aside, [self.added(point, name, rounding) for name in names], look.alone(), label)
            panel.axhline(0, **figures.REFERENCE())
            # Linear below a hundredth, logarithmic above: losses may fall as well.
            panel.set_yscale("symlog", linthresh=1e-2)
            panel.set_xticks(range(len(names)), [name.upper() for name in names])
            panel.set_xlabel("format")
            panel.set_ylabel("added to the test loss in nats")
            panel.set_title(rounding)
        figures.share_y(axes)
        for figure, panel in zip(drawn, axes, strict=True):
            figures.legend(figure, panel, columns=2)
        return drawn

    def _claims(self) -> list[Claim]:
        return [self._forward(), *map(self._outperforms, ("act_bwd", "grad"))]

    def _forward(self) -> Claim:
        name = self.settings.formats[0]
        forward, backward = (self.added(point, name, "stochastic") for point in ("act", "act_bwd"))
        more = difference(self.losses("act", name, "stochastic"), self.losses("act_bwd", name, "stochastic"))
        return Claim(
            "Section 3.3",
            "inputs stay in high precision in the forward pass, to ensure convergence",
            f"{name}, stochastic: forward {forward:+.3f}, backward {backward:+.3f}",
            above(more),
            test="test loss added by rounding inputs forward minus that by rounding them backward",
            rule="the sign of the interval: the advice has a reason if forward costs more",
            power=f"{more.detects:.3f} nats",
        )

    def _outperforms(self, point: str) -> Claim:
        name = self.settings.formats[0]
        ahead = difference(self.losses(point, name, "nearest"), self.losses(point, name, "stochastic"))
        return Claim(
            "Section 7",
            f"stochastic rounding consistently outperforms round-to-nearest (here: {POINTS[point]})",
            f"{name}: nearest adds {ahead:+.4f} to the test loss compared with stochastic",
            above(ahead),
            test="test loss with nearest minus that with stochastic rounding of the same point",
            rule="the sign of the interval: any lead is one",
            power=f"{ahead.detects:.4f} nats",
        )

    def _meaning(self) -> str:
        coarse = self.settings.formats[0]
        costs = {(point, rounding): self.added(point, coarse, rounding) for point in POINTS for rounding in self.settings.roundings}
        (worst, rounding), cost = max(costs.items(), key=lambda item: item[1].value)
        (least, other), best = min(costs.items(), key=lambda item: item[1].value)
        return (
            f"The rounding that hurts most is that of the {POINTS[worst]}, and the one that hurts least is that of the {POINTS[least]}. In "
            f"{coarse.upper()}, they add {cost:+.3f} ({rounding} rounding) and {best:+.4f} ({other}) to the test loss."
        )
