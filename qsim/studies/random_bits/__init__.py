"""Few random bits: the cost of stochastic rounding whose random numbers have only a few bits, as in hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import qsim
from qsim import FivePoint, Quantizer, Stochastic
from qsim.studies.choices import choice, require
from qsim.studies.learners import nets
from qsim.studies.learners.images import images
from qsim.studies.learners.training import Training, accuracy, full_precision, mean_loss, train
from qsim.studies.study import WrittenStudy

#: What a run measures: the bias of the rounding itself, or a net whose backward pass or whose weight updates round.
FULL, BIAS, BACKWARD, UPDATE = "fp32", "bias", "accuracy", "update"
#: The number of roundings from which a bias is computed.
SAMPLES = 1 << 20
#: The reference: with 32 random bits, probabilities are exact.
EXACT = Stochastic(32)


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice("digits", "digits, or a folder with Fashion-MNIST's or CIFAR-10's files")
    formats: tuple[str, ...] = choice(
        ("e4m3", "e4m0"), "formats of inputs and gradients in the backward pass; the paper's hardware has the first"
    )
    weights: str = choice("e5m3", "format of weights whose updates are rounded")
    bits: tuple[int, ...] = choice((1, 2, 3, 4, 6, 8, 12), "numbers of random bits")
    batch: int = choice(64, "images per update")
    steps: int = choice(200, "number of updates")
    rate: float = choice(0.1, "constant learning rate of plain SGD where the backward pass rounds")
    update_rate: float = choice(0.02, "the same where updates round: the lower it is, the smaller they are")
    seeds: int = choice(5, "number of seeds")


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


class RandomBitsStudy(WrittenStudy[Settings, Run]):
    """Train with few random bits, and measure the bias of the rounding itself."""

    name = "random-bits"
    question = "How many random bits does stochastic rounding need?"
    source = "no claim of a paper; the hardware of Liu et al., Training with Fewer Bits, Section 6.2, has six bits"
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
        in_range = settings.bits and all(1 <= bits < 32 for bits in settings.bits)
        require(settings, "bits", in_range, "be from 1 to 31, because 32 is the reference")
        require(settings, "formats", settings.formats, "contain at least one")
        few = [Stochastic(bits, correction=correction) for bits in settings.bits for correction in (False, True)]
        found = []
        for seed in range(settings.seeds):
            found += [_bias_of(settings, rounding, seed) for rounding in few]
            for what, formats in ((BACKWARD, settings.formats), (UPDATE, (settings.weights,))):
                found.append(_trained(settings, what, FULL, EXACT, seed))
                found += [_trained(settings, what, name, rounding, seed) for name in formats for rounding in (*few, EXACT)]
        return found

    def work(self, run: Run) -> float:
        """Measuring a bias takes almost no time."""
        return 2e4 if run.what == BIAS else run.steps * (100 + run.batch) * (1.0 if run.format == FULL else 3.0)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """The mean error in units of the gap between neighbours, or the loss and the accuracy of a net."""
        if run.what == BIAS:
            return {"bias": _bias(run, device)}
        if run.what == UPDATE:
            return _of_updates(run, device)
        rounds = Quantizer(run.format, run.rounding) if run.format != FULL else None
        points = FivePoint(act_bwd=rounds, grad=rounds) if rounds is not None else None
        how = Training(run.steps, run.batch, loss_scale=nets.in_range(run.format) * run.batch)
        return nets.outcome(run.data, points, how, run.rate, run.seed, device)


def _bias_of(settings: Settings, rounding: Stochastic, seed: int) -> Run:
    """The run that measures a rounding's bias."""
    return Run(BIAS, "", settings.formats[0], rounding.bits or 32, rounding.correction, 0, 0, 0.0, seed)


def _trained(settings: Settings, what: str, format: str, rounding: Stochastic, seed: int) -> Run:
    """The run that trains a net whose backward pass or whose weight updates round."""
    rate = settings.update_rate if what == UPDATE else settings.rate
    return Run(what, settings.data, format, rounding.bits or 32, rounding.correction, settings.batch, settings.steps, rate, seed)


def _of_updates(run: Run, device: torch.device) -> dict[str, Any]:
    """Train a net whose weights are rounded after each update; everything else is in full precision."""
    found = images(run.data, device)
    torch.manual_seed(run.seed)
    model = found.net().to(device)
    with torch.no_grad():
        for weight in model.parameters():
            qsim.quantize_(weight, run.format)
    optimizer = qsim.optim.SGD(model.parameters(), lr=run.rate, format=run.format, update=run.rounding, seed=run.seed)
    with full_precision(device):
        train(model, found, optimizer, Training(run.steps, run.batch), run.seed)
        return {"accuracy": accuracy(model, found), "loss": mean_loss(model, found.test_x, found.test_y)}


def _bias(run: Run, device: torch.device) -> float:
    """The mean error over numbers anywhere between 1 and its neighbour, in units of the gap."""
    gap = qsim.format(run.format).epsilon
    place = torch.rand(SAMPLES, dtype=torch.float64, generator=torch.Generator().manual_seed(run.seed)).to(device)
    rounded = qsim.quantize(1 + place * gap, run.format, rounding=run.rounding, seed=run.seed)
    return float(((rounded - 1) / gap - place).mean())
