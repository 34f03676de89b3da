"""Stagnation: gradient descent on least squares, with weights rounded to nearest, stochastically, with Kahan summation, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from qsim.studies.choices import choice, require
from qsim.studies.stagnation.least_squares import ALL, METHODS, NEAREST, ONE, DescendingWeights, Descent, Problems, problems
from qsim.studies.study import WrittenStudy, run_of

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


@dataclass(frozen=True)
class Run:
    """Some problems, solved in one way."""

    method: str
    format: str
    gradient: str
    rate: float
    steps: int
    noise: float
    problems: int
    samples: int
    dimensions: int
    seed: int

    @property
    def descent(self) -> Descent:
        """The settings of the descent."""
        return Descent(self.method, self.format, self.gradient, self.rate, self.seed)


class StagnationStudy(WrittenStudy[Settings, Run]):
    """Measure how close weights come to the optimum, compared with the limit of Theorem 1 for round-to-nearest."""

    name = "stagnation"
    question = "Which roundings keep gradient descent away from the optimum?"
    source = "Zamirai et al., Revisiting BFloat16 Training, Figure 2, Theorems 1 and 2"
    settings = Settings
    run = Run

    def quick(self) -> Settings:
        """Two rates, few problems."""
        return Settings(rates=(0.3, 0.1), length=40.0, sample_rate=0.02, sample_steps=400, problems=16, samples=200, seeds=1)

    def full(self) -> Settings:
        """More problems, and smaller rates."""
        return Settings(rates=(0.3, 0.1, 0.03, 0.01, 0.003), sample_steps=10000, problems=256)

    def runs(self, settings: Settings) -> Sequence[Run]:
        """With all samples, every method at every rate, and nearest for single weights. With one, every method, with and without noise."""
        falls = len(settings.rates) > 1 and list(settings.rates) == sorted(settings.rates, reverse=True)
        require(settings, "rates", falls, "be at least two, from large to small")
        found = []
        for seed in range(settings.seeds):
            for method in METHODS:
                found += [full_gradient(settings, method, rate, seed) for rate in settings.rates]
                found += [single(settings, method, noise, seed) for noise in (0.0, settings.noise)]
            found += [replace(full_gradient(settings, NEAREST, rate, seed), dimensions=1) for rate in settings.rates]
        return found

    def work(self, run: Run) -> float:
        """A constant per step, plus a term per number."""
        return run.steps * (30_000 + run.problems * run.dimensions * (run.samples if run.gradient == ALL else 1))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Descend, and record the distance from the optimum at every step."""
        drawn = problems(run.problems, run.samples, run.dimensions, run.noise, run.format, run.seed)
        data = Problems(drawn.x.to(device), drawn.y.to(device), drawn.optimum.to(device))
        largest = 1 / data.lipschitz(run.gradient).max().item()
        if run.rate > largest:
            raise ValueError(f"rate: the theorems hold up to 1/L, here {largest:.3g} with the gradient of {run.gradient}; got {run.rate:g}")
        weights = DescendingWeights(data, run.descent)
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


def full_gradient(settings: Settings, method: str, rate: float, seed: int) -> Run:
    """The run with the gradient of all samples, which a model can fit perfectly."""
    steps = round(settings.length / rate)
    return run_of(Run, settings, method=method, gradient=ALL, rate=rate, steps=steps, noise=0.0, seed=seed)


def single(settings: Settings, method: str, noise: float, seed: int) -> Run:
    """The run with the gradient of one sample."""
    rate, steps = settings.sample_rate, settings.sample_steps
    return run_of(Run, settings, method=method, gradient=ONE, rate=rate, steps=steps, noise=noise, seed=seed)
