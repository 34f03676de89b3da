"""Batch size against precision: does a larger batch make up for fewer bits of the backward pass, and for which rounding?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import qsim
from qsim import FivePoint, Quantizer
from qsim.studies._choices import choice
from qsim.studies._images import images
from qsim.studies._report import Report
from qsim.studies._study import Result, Study
from qsim.studies._training import Training, accuracy, full_precision, squared_gradient, train

FULL = "fp32"
PLAIN, IN_RANGE = "none", "in range"
_PAPER = "Liu et al., Training with Fewer Bits"


@dataclass(frozen=True)
class Settings:
    """What may be chosen."""

    data: str = choice("digits", "digits, or a folder with Fashion-MNIST's or CIFAR-10's files")
    formats: tuple[str, ...] = choice(("e4m0", "e4m1", "e4m2"), "of the backward pass's inputs and gradients, from coarse to fine")
    roundings: tuple[str, ...] = choice(("stochastic", "nearest"), "of both")
    batches: tuple[int, ...] = choice((8, 32, 128, 512), "images of an update, from few to many")
    micro_batches: int = choice(4, "also sum up the largest batch, in the coarsest format, from so many parts; 1: do not")
    steps: int = choice(200, "updates")
    rate: float = choice(0.1, "learning rate of plain SGD, which stays the same")
    seeds: int = choice(3, "how many")


@dataclass(frozen=True)
class Run:
    """One net that is trained."""

    data: str
    format: str
    rounding: str
    batch: int
    micro_batches: int
    loss_scale: str
    steps: int
    rate: float
    seed: int

    @property
    def points(self) -> FivePoint | None:
        """What the backward pass rounds: inputs and gradients, as Figure 3 of the paper has it but for the weights."""
        if self.format == FULL:
            return None
        rounds = Quantizer(self.format, self.rounding)
        return FivePoint(act_bwd=rounds, grad=rounds)


class BatchSize(Study[Settings, Run]):
    """Trains a net at several batch sizes with the backward pass in a few bits."""

    name = "batch-size"
    question = "Does a larger batch buy back bits of precision?"
    source = f"{_PAPER}, Figures 1, 5 and 6, Tables 1 to 3"
    settings = Settings
    run = Run

    def quick(self) -> Settings:
        """Two formats, two batch sizes, few steps."""
        return Settings(formats=("e4m0", "e4m1"), batches=(16, 128), steps=100, seeds=2)

    def full(self) -> Settings:
        """Five batch sizes, for a GPU."""
        return Settings(batches=(8, 32, 128, 512, 2048), steps=1500)

    def runs(self, settings: Settings) -> Sequence[Run]:
        """Every format, rounding and batch size, with and without a loss scale; full precision once."""
        found = []
        for seed in range(settings.seeds):
            for batch in settings.batches:
                found.append(Run(settings.data, FULL, "nearest", batch, 1, PLAIN, settings.steps, settings.rate, seed))
                found += [
                    Run(settings.data, name, rounding, batch, 1, scale, settings.steps, settings.rate, seed)
                    for name in settings.formats
                    for rounding in settings.roundings
                    for scale in (PLAIN, IN_RANGE)
                ]
            if settings.micro_batches > 1:
                coarse, most = settings.formats[0], settings.batches[-1]
                found.append(
                    Run(settings.data, coarse, "stochastic", most, settings.micro_batches, PLAIN, settings.steps, settings.rate, seed)
                )
        return found

    def work(self, run: Run) -> float:
        """A step costs something whatever its size, and then by the image."""
        return run.steps * (run.micro_batches * 100 + run.batch) * (1 if run.format == FULL else 2)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Trains; the gradient is looked at over the last quarter of the steps, and is that of full precision."""
        data = images(run.data, device)
        torch.manual_seed(run.seed)
        model, judge = data.net().to(device), data.net().to(device)
        if run.points is not None:
            qsim.convert(model, run.points)
        optimizer = torch.optim.SGD(model.parameters(), lr=run.rate)
        scale = 64.0 * run.batch / run.micro_batches if run.loss_scale == IN_RANGE else 1.0
        norms: list[float] = []

        def look(done: int) -> None:
            if done > 0.75 * run.steps:
                judge.load_state_dict(model.state_dict())
                norms.append(squared_gradient(judge, data))

        with full_precision(device):
            how = Training(run.steps, run.batch, run.micro_batches, scale)
            train(model, data, optimizer, how, run.seed, look, max(1, run.steps // 40))
            judge.load_state_dict(model.state_dict())
            return {"accuracy": accuracy(judge, data), "squared_gradient": float(np.mean(norms))}

    def report(self, settings: Settings, results: Sequence[Result[Run]]) -> Report:
        """Curves over the batch size, and what batch buys back a bit."""
        from qsim.studies._batch_size_report import Findings

        return Findings(self, settings, results).report()
