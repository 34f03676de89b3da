"""Random walks: the number of steps to a level when updates are smaller than the distance between levels."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import qsim
from qsim.studies.choices import choice, require
from qsim.studies.random_walk.walks import CONSTANT, HALVED, HARMONIC, LINEAR, UpdateSchedule, exact_steps
from qsim.studies.study import Run, TrialStudy

EXACT, STOCHASTIC = "exact", "stochastic"
#: The distance between bfloat16's levels from 1 to 2; walks go down from 1.75, at most as far as 1.25.
_DISTANCE, _START, MOST_LEVELS = 2.0**-7, 1.75, 64
#: The number of points of a curve.
_POINTS = 60


@dataclass(frozen=True)
class Settings:
    """The settings of the study. Updates are in units of the distance between levels."""

    constant: tuple[float, ...] = choice((0.5, 0.25, 0.0625, 0.015625), "constant updates, to the next level")
    floors: tuple[float, ...] = choice((0.015625, 0.125), "floors of updates that start at 1/2 and are halved at each step")
    harmonic_steps: int = choice(128, "number of steps with updates of 1/2, 1/4, 1/6, …")
    weights: int = choice(1 << 17, "number of weights that walk to the next level, per seed")
    levels: int = choice(64, "number of levels to descend on the linear loss with Adam; at most 64")
    first: float = choice(0.02576, "Adam's first update, which decays linearly")
    length: int = choice(5000, "step at which it would reach zero")
    minima: tuple[float, ...] = choice((55 / 65536, 320 / 65536), "minimum updates of Adam: a low one and a high one")
    steps: int = choice(30000, "largest number of Adam steps")
    adam_weights: int = choice(1 << 15, "number of weights that descend the linear loss, per seed")
    seeds: int = choice(2, "number of seeds")


#: The values of a run, in the order in which they determine its noise.
_VALUES = ("optimizer", "updates", "first", "floor", "length", "levels", "method", "weights", "steps", "seed")


def schedule_of(run: Run) -> UpdateSchedule:
    """The update of each step."""
    return UpdateSchedule(run.updates, run.first, run.floor, run.length)


class RandomWalkStudy(TrialStudy[Settings]):
    """Count the steps of weights to a level, with exact updates and with stochastic rounding."""

    name = "random-walk"
    question = "How long do small updates take under stochastic rounding?"
    source = "Ozkara et al., Stochastic Rounding for LLM Training, Section 2.2"
    settings = Settings

    #: Larger updates.
    quick_form = Settings(
        constant=(0.5, 0.0625), floors=(0.0625, 0.125), harmonic_steps=64, weights=1 << 15,
        levels=16, first=0.0656, length=500, minima=(400 / 65536, 1024 / 65536), steps=3000, adam_weights=1 << 11, seeds=1,
    )  # fmt: skip

    #: More weights, and smaller updates.
    full_form = Settings(constant=(0.5, 0.25, 0.0625, 0.015625, 2**-8), weights=1 << 20, adam_weights=1 << 17)

    def check(self, settings: Settings) -> None:
        """Levels that are equally far apart."""
        apart = f"be in [1, {MOST_LEVELS}], where they are equally far apart"
        require(settings, "levels", 1 <= settings.levels <= MOST_LEVELS, apart)

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """To the next level with SGD, and down the linear loss with Adam, where exact weights need one seed."""
        common = {"optimizer": "sgd", "length": 0, "levels": 1, "method": STOCHASTIC, "weights": settings.weights}
        # For constant updates p, a share of exp(-20) takes more than 20 / p steps.
        for update in settings.constant:
            yield {**common, "updates": CONSTANT, "first": update, "floor": 0.0, "steps": round(20 / update)}
        for floor in settings.floors:
            yield {**common, "updates": HALVED, "first": 0.5, "floor": floor, "steps": round(20 / floor)}
        # For decaying updates, step counts vary widely: an equally exact mean needs more weights.
        rest = {"first": 0.5, "floor": 0.0, "steps": settings.harmonic_steps, "weights": 8 * settings.weights}
        yield {**common, "updates": HARMONIC, **rest}
        for minimum in settings.minima:
            down = {"optimizer": "adam", "updates": LINEAR, "first": settings.first, "floor": minimum, "length": settings.length}
            down |= {"levels": settings.levels, "steps": settings.steps}
            if seed == 0:
                yield {**down, "method": EXACT, "weights": 1}
            yield {**down, "method": STOCHASTIC, "weights": settings.adam_weights}

    def work(self, run: Run) -> float:
        """A constant per step, plus a term per weight; weights that have arrived are no longer updated."""
        return float(exact_steps(schedule_of(run)(run.steps), run.levels) * (run.weights + 20_000) + run.steps * 20_000)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Take steps until all weights have arrived or the limit is reached."""
        walk = _Walk(run, device)
        points = {round(step) for step in np.linspace(1, run.steps, _POINTS)} | {
            round(step) for step in np.geomspace(1, run.steps, _POINTS)
        }
        curve = []
        total = squares = before = 0.0
        for step, update in enumerate(schedule_of(run)(run.steps).tolist(), start=1):
            arrived = walk.step(update)
            total, squares, before = total + (arrived - before) * step, squares + (arrived - before) * step**2, arrived
            if step in points:
                curve.append([step, 1 - arrived / run.weights, *walk.left()])
            if arrived == run.weights:
                break
        late = run.weights - arrived
        mean = (total + late * run.steps) / run.weights
        variance = (squares + late * run.steps**2) / run.weights - mean**2
        return {"mean": mean, "variance": variance, "late": late / run.weights, "curve": curve}


class _Walk:
    """The weights of a run, without those that have long since arrived."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run, self._goal, self._dropped, self._drops = run, _START - run.levels * _DISTANCE, 0, 0
        self._optimizer = self._begin(torch.full((run.weights,), _START, device=device))

    def step(self, update: float) -> int:
        """Take one step down.

        Returns:
            The number of weights that have arrived so far.
        """
        self._optimizer.param_groups[0]["lr"] = update * _DISTANCE
        self._optimizer.step()
        there = self._weights.detach() <= self._goal
        arrived = int(there.sum())
        if 2 * arrived > len(there) > arrived:
            # The others continue with a new optimizer. While gradients are constant, so are Adam's bias-corrected moments.
            self._dropped, self._drops = self._dropped + arrived, self._drops + 1
            self._optimizer = self._begin(self._weights.detach()[~there])
            return self._dropped
        return self._dropped + arrived

    def left(self) -> tuple[float, float, float]:
        """The number of levels still to go: the mean, and the range of the middle 90 % of weights."""
        left = ((self._weights.detach().double() - self._goal) / _DISTANCE).clamp(min=0).cpu().numpy()
        all_ = np.concatenate([np.zeros(self._dropped), left])
        low, high = np.quantile(all_, [0.05, 0.95]).tolist()
        return float(all_.mean()), low, high

    def _begin(self, weights: Tensor) -> torch.optim.Optimizer:
        run = self._run
        self._weights = nn.Parameter(weights.to(torch.bfloat16 if run.method == STOCHASTIC else torch.float32))
        self._weights.grad = torch.ones_like(self._weights)
        # Each run draws its own noise, so that their deviations are independent.
        text = ", ".join(f"{name}={getattr(run, name)!r}" for name in _VALUES)
        seed = (zlib.crc32(f"Run({text})".encode()) << 20) + self._drops
        update = "stochastic" if run.method == STOCHASTIC else "nearest"
        if run.optimizer == "adam":
            return qsim.optim.Adam([self._weights], eps=0.0, state="fp32", update=update, seed=seed)
        return qsim.optim.SGD([self._weights], update=update, seed=seed)
