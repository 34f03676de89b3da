"""Few random bits: the cost of stochastic rounding whose random numbers have only a few bits, as in hardware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import qsim
from qsim import FivePoint, Quantizer, Stochastic
from qsim.studies.choices import choice, require
from qsim.studies.learners import nets
from qsim.studies.learners.images import images
from qsim.studies.learners.training import Training, accuracy, full_precision, mean_loss, train
from qsim.studies.study import Run, TrialStudy

#: What a run measures: the bias of the rounding itself, or a net whose backward pass or whose weight updates round.
FULL, BIAS, BACKWARD, UPDATE = "fp32", "bias", "accuracy", "update"
#: The number of roundings from which a bias is computed.
SAMPLES = 1 << 20
#: The reference: with 32 random bits, probabilities are exact.
EXACT = {"bits": 32, "correction": False}


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


class RandomBitsStudy(TrialStudy[Settings]):
    """Train with few random bits, and measure the bias of the rounding itself."""

    name = "random-bits"
    question = "How many random bits does stochastic rounding need?"
    source = "no claim of a paper; the hardware of Liu et al., Training with Fewer Bits, Section 6.2, has six bits"
    settings = Settings

    #: Two numbers of bits, few steps.
    quick_form = Settings(formats=("e4m3",), bits=(1, 6), steps=60, seeds=2)

    #: More steps, for a GPU.
    full_form = Settings(batch=128, steps=1500, seeds=5)

    def check(self, settings: Settings) -> None:
        """Few bits, and some formats."""
        in_range = settings.bits and all(1 <= bits < 32 for bits in settings.bits)
        require(settings, "bits", in_range, "be from 1 to 31, because 32 is the reference")
        require(settings, "formats", settings.formats, "contain at least one")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """Every number of bits, with and without correction, for the bias and in training; all bits, and full precision."""
        few = [{"bits": bits, "correction": correction} for bits in settings.bits for correction in (False, True)]
        unused = {"data": "", "batch": 0, "steps": 0, "rate": 0.0}
        for rounding in few:
            yield {"what": BIAS, "format": settings.formats[0], **rounding, **unused}
        trained = {name: getattr(settings, name) for name in ("data", "batch", "steps")}
        for what, formats, rate in ((BACKWARD, settings.formats, settings.rate), (UPDATE, (settings.weights,), settings.update_rate)):
            own = {"what": what, **trained, "rate": rate}
            yield {**own, "format": FULL, **EXACT}
            for name, rounding in product(formats, (*few, EXACT)):
                yield {**own, "format": name, **rounding}

    def work(self, run: Run) -> float:
        """Measuring a bias takes almost no time."""
        return 2e4 if run.what == BIAS else run.steps * (100 + run.batch) * (1.0 if run.format == FULL else 3.0)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """The mean error in units of the gap between neighbours, or the loss and the accuracy of a net."""
        if run.what == BIAS:
            return {"bias": _bias(run, device)}
        if run.what == UPDATE:
            return _of_updates(run, device)
        rounds = None if run.format == FULL else Quantizer(run.format, _rounding(run))
        points = None if rounds is None else FivePoint(act_bwd=rounds, grad=rounds)
        how = Training(run.steps, run.batch, loss_scale=nets.in_range(run.format) * run.batch)
        return nets.outcome(run, points, device, how)


def _rounding(run: Run) -> Stochastic:
    """The rounding of a run; with 32 random bits it is exact."""
    return Stochastic(run.bits, correction=run.correction)


def _of_updates(run: Run, device: torch.device) -> dict[str, Any]:
    """Train a net whose weights are rounded after each update; everything else is in full precision."""
    found = images(run.data, device)
    torch.manual_seed(run.seed)
    model = found.net().to(device)
    with torch.no_grad():
        for weight in model.parameters():
            qsim.quantize_(weight, run.format)
    optimizer = qsim.optim.SGD(model.parameters(), lr=run.rate, format=run.format, update=_rounding(run), seed=run.seed)
    with full_precision(device):
        train(model, found, optimizer, Training(run.steps, run.batch), run.seed)
        return {"accuracy": accuracy(model, found), "loss": mean_loss(model, found.test_x, found.test_y)}


def _bias(run: Run, device: torch.device) -> float:
    """The mean error over numbers anywhere between 1 and its neighbour, in units of the gap."""
    gap = qsim.format(run.format).epsilon
    place = torch.rand(SAMPLES, dtype=torch.float64, generator=torch.Generator().manual_seed(run.seed)).to(device)
    rounded = qsim.quantize(1 + place * gap, run.format, rounding=_rounding(run), seed=run.seed)
    return float(((rounded - 1) / gap - place).mean())
