"""One point at a time: the cost of each of a layer's five roundings, by format and rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from matplotlib.figure import Figure

from qsim import FivePoint, Quantizer, scaling
from qsim.plot import figures
from qsim.studies.choices import choice, require
from qsim.studies.findings import Findings, Values
from qsim.studies.learners import nets
from qsim.studies.learners.images import described
from qsim.studies.report import Claim, Picture
from qsim.studies.statistics import Interval, above, difference, mean
from qsim.studies.study import Run, TrialStudy
from qsim.text.tables import Table

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


def only(point: str, format: str, rounding: str) -> FivePoint:
    """One point, with a scale per tensor, which brings it into the format's range, so that only the bits are compared."""
    chosen: dict[str, Any] = {point: Quantizer(format, rounding, scale=scaling.PerTensor())}
    return FivePoint(**{"act_bwd": None, "weight_bwd": None, **chosen})


class PointsStudy(TrialStudy[Settings]):
    """Train a net with one of its five points rounded."""

    name = "points"
    question = "Which of the five roundings of a layer hurts?"
    source = "Liu et al., Training with Fewer Bits, Section 3"
    settings = Settings
    shared = ("data", "batch", "steps", "rate")

    #: One format, few steps.
    quick_form = Settings(formats=("e2m1",), steps=60, seeds=2)

    #: More steps, for a GPU.
    full_form = Settings(batch=128, steps=1500, seeds=5)

    def check(self, settings: Settings) -> None:
        """Some formats, and both roundings."""
        require(settings, "roundings", {"stochastic", "nearest"} <= set(settings.roundings), "contain stochastic and nearest")
        require(settings, "formats", settings.formats, "contain at least one")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, str]]:
        """Full precision, and every point in every format and rounding."""
        yield {"point": NONE, "format": "fp32", "rounding": "nearest"}
        for point, name, rounding in product(POINTS, settings.formats, settings.roundings):
            yield {"point": point, "format": name, "rounding": rounding}

    def work(self, run: Run) -> float:
        """Return a cost: stochastic rounding takes longer."""
        return float(run.steps * (100 + run.batch) * (1.0 if run.point == NONE else 2.0 if run.rounding == "nearest" else 3.0))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train the net, and test it with its rounding."""
        points = None if run.point == NONE else only(run.point, run.format, run.rounding)
        return nets.outcome(run, points, device)


class _Written(Findings[Settings]):
    def parts(self) -> list[str | Table | Picture]:
        text = self.text("setting", learner=described(self.settings.data))
        return [text, self.picture("points", self._draw), *map(self._table, self.settings.roundings)]

    def losses(self, point: str, name: str, rounding: str) -> Values:
        """The test loss of each seed."""
        return self.over_seeds("own_loss", point=point, format=name, rounding=rounding)

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
            added = {label: [self.added(point, name, rounding) for name in names] for point, label in POINTS.items()}
            figures.bands(panel, range(len(names)), added, apart=0.13, alone=True)
            panel.axhline(0, **figures.REFERENCE())
            # Linear below a hundredth, logarithmic above: losses may fall as well.
            panel.set_yscale("symlog", linthresh=1e-2)
            panel.set_xticks(range(len(names)), [name.upper() for name in names])
            panel.set(xlabel="format", ylabel="added to the test loss in nats", title=rounding)
        figures.share_y(axes)
        figures.legends(drawn, axes, columns=2)
        return drawn

    def claims(self) -> list[Claim]:
        name = self.settings.formats[0]
        more = difference(self.losses("act", name, "stochastic"), self.losses("act_bwd", name, "stochastic"))
        forward, backward = (self.added(point, name, "stochastic") for point in ("act", "act_bwd"))
        ahead = {
            point: difference(self.losses(point, name, "nearest"), self.losses(point, name, "stochastic")) for point in ("act_bwd", "grad")
        }
        return [
            self.claim("forward", above(more), more=more, forward=forward, backward=backward),
            *(self.claim("outperforms", above(lead), ahead=lead, point=POINTS[point]) for point, lead in ahead.items()),
        ]

    def meaning(self) -> str:
        coarse = self.settings.formats[0]
        costs = {(point, rounding): self.added(point, coarse, rounding) for point in POINTS for rounding in self.settings.roundings}
        (worst, rounding), cost = max(costs.items(), key=lambda item: item[1].value)
        (least, other), best = min(costs.items(), key=lambda item: item[1].value)
        names = {"worst": POINTS[worst], "least": POINTS[least], "format": coarse.upper()}
        return self.text("meaning", **names, rounding=rounding, other=other, cost=cost, best=best)
