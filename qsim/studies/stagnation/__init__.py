"""Stagnation: gradient descent on least squares, with weights rounded to nearest, stochastically, with Kahan summation, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qsim.studies.choices import choice, require
from qsim.studies.stagnation.least_squares import ALL, METHODS, NEAREST, ONE, DescendingWeights, Descent, Problems, problems
from qsim.studies.study import Run, TrialStudy

#: The number of points of a curve, and the significant digits that are stored of every number.
_POINTS, _DIGITS = 24, 6


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    format: str = choice("bf16", "format of rounded tensors")
    rates: tuple[float, ...] = choice((0.3, 0.1, 0.03, 0.01), "learning rates with the gradient of all samples, from large to small")
    length: float = choice(25.0, "number of steps times learning rate, with the gradient of all samples")
    sample_rate: float = choice(0.01, "learning rate with the gradient of one sample")
    sample_steps: int = choice(3000, "number of steps with the gradient of one sample")
    noise: float = choice(0.5, "standard deviation of the noise in noisy labels")
    problems: int = choice(32, "number of problems per seed")
    samples: int = choice(1000, "samples per problem")
    dimensions: int = choice(10, "dimensions per problem")
    seeds: int = choice(1, "number of seeds")


class StagnationStudy(TrialStudy[Settings]):
    """Measure how close weights come to the optimum, compared with the limit of Theorem 1 for round-to-nearest."""

    name = "stagnation"
    question = "Which roundings keep gradient descent away from the optimum?"
    source = "Zamirai et al., Revisiting BFloat16 Training, Figure 2, Theorems 1 and 2"
    settings = Settings
    shared = ("format", "problems", "samples", "dimensions")

    #: Two rates, few problems.
    quick_form = Settings(rates=(0.3, 0.1), length=40.0, sample_rate=0.02, sample_steps=400, problems=16, samples=200, seeds=1)

    #: More problems, and smaller rates.
    full_form = Settings(rates=(0.3, 0.1, 0.03, 0.01, 0.003), sample_steps=10000, problems=256)

    def check(self, settings: Settings) -> None:
        """Several rates."""
        falls = len(settings.rates) > 1 and list(settings.rates) == sorted(settings.rates, reverse=True)
        require(settings, "rates", falls, "be at least two, from large to small")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """With all samples, every method at every rate, and nearest for single weights. With one, every method, with and without noise."""
        whole = [{"gradient": ALL, "rate": rate, "steps": round(settings.length / rate), "noise": 0.0} for rate in settings.rates]
        single = {"gradient": ONE, "rate": settings.sample_rate, "steps": settings.sample_steps}
        for method in METHODS:
            yield from ({"method": method, **way} for way in whole)
            yield from ({"method": method, **single, "noise": noise} for noise in (0.0, settings.noise))
        yield from ({"method": NEAREST, **way, "dimensions": 1} for way in whole)

    def work(self, run: Run) -> float:
        """A constant per step, plus a term per number."""
        return float(run.steps * (30_000 + run.problems * run.dimensions * (run.samples if run.gradient == ALL else 1)))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Descend, and record the distance from the optimum at every step."""
        drawn = problems(run.problems, run.samples, run.dimensions, run.noise, run.format, run.seed)
        data = Problems(drawn.x.to(device), drawn.y.to(device), drawn.optimum.to(device))
        largest = 1 / data.lipschitz(run.gradient).max().item()
        if run.rate > largest:
            raise ValueError(f"rate: the theorems hold up to 1/L, here {largest:.3g} with the gradient of {run.gradient}; got {run.rate:g}")
        weights = DescendingWeights(data, Descent(run.method, run.format, run.gradient, run.rate, run.seed))
        points = sorted({round(step) for step in np.linspace(1, run.steps, _POINTS)})
        lowest = torch.full((run.problems,), torch.inf, dtype=torch.float64, device=device)
        loss, since = torch.zeros_like(lowest), 0
        distances, losses = [], []
        for step in range(1, run.steps + 1):
            loss += weights.step()
            since += 1
            distance = (weights.values - data.optimum).norm(dim=1)
            torch.minimum(lowest, distance, out=lowest)
            if step in points:
                distances.append(distance.clone())
                losses.append(loss / since)
                loss, since = torch.zeros_like(loss), 0
        return {
            "steps": points,
            "distances": [_stored(each) for each in distances],
            "losses": [_stored(each) for each in losses],
            "lowest": _stored(lowest),
            "start": _stored(data.optimum.norm(dim=1)),
            "smallest": _stored(data.optimum.abs().amin(1)),
            "lipschitz": _stored(data.lipschitz(run.gradient)),
            "convexity": _stored(data.convexity()),
        }


def _stored(values: torch.Tensor) -> list[float]:
    """One number per problem, short enough for results that are small."""
    return [float(f"{value:.{_DIGITS}g}") for value in values.tolist()]
