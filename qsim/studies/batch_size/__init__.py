"""Batch size against precision: does a larger batch compensate for fewer bits in the backward pass, and for which rounding?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, ClassVar

import torch

import qsim
from qsim import FivePoint, Quantizer
from qsim.studies.choices import choice, require, require_among, require_increasing
from qsim.studies.learners import nets
from qsim.studies.learners.examples import MODELS, OWN, predictions
from qsim.studies.learners.training import Training
from qsim.studies.study import Run, TrialStudy

FULL = "fp32"
PLAIN, IN_RANGE = "none", "in range"
SCALES = {PLAIN: "unscaled loss", IN_RANGE: "loss scaled into range"}
#: What all batch sizes have in common: the number of updates, or the number of images.
STEPS, IMAGES = "steps", "images"
DESIGNS = (STEPS, IMAGES)
#: The number of batches, and of draws per batch, over which variances are measured.
_BATCHES, _DRAWS = 24, 6
_PAPER = "Liu et al., Training with Fewer Bits"


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice(
        "digits",
        "digits, or a folder with Fashion-MNIST's or CIFAR-10's files; for a GPT, library or a text; pre-trained: sums or reversals",
    )
    model: str = choice(OWN, f"one of {', '.join(MODELS)}; own is the net that suits the images")
    formats: tuple[str, ...] = choice(("e4m0", "e4m1"), "formats of inputs and gradients in the backward pass, from coarse to fine")
    roundings: tuple[str, ...] = choice(("stochastic", "nearest"), "roundings of both")
    weights: str = choice(FULL, "format to which weights are rounded to nearest in products; fp32: they are not rounded")
    scales: tuple[str, ...] = choice(tuple(SCALES), "loss scales: none, in range, or both")
    batches: tuple[int, ...] = choice((16, 64, 256), "images per update, in increasing order")
    designs: tuple[str, ...] = choice(DESIGNS, "what all batch sizes have in common: steps (the number of updates), images, or both")
    micro_batches: int = choice(4, "also accumulate the largest batch, in the coarsest format, over this many micro-batches; 1: do not")
    steps: int = choice(200, "number of updates; with equal images, those of the middle batch size")
    rate: float = choice(0.1, "constant learning rate of plain SGD; of Adam for a GPT")
    looks: int = choice(10, "how often the true gradient is measured in the last quarter of the steps")
    seeds: int = choice(6, "number of seeds")

    @property
    def middle(self) -> int:
        """The batch size at which variances are measured, and whose number of images all have if these are equal."""
        return self.batches[len(self.batches) // 2]

    def updates(self, design: str, batch: int) -> int:
        """The number of updates with a batch size."""
        return self.steps if design == STEPS else max(1, round(self.steps * self.middle / batch))


def _backward(format: str, rounding: str, weights: str = FULL) -> FivePoint:
    """Points that round inputs and gradients in the backward pass, as in Figure 3 of the paper, and weights if they have a format."""
    rounds = Quantizer(format, rounding)
    return FivePoint(act_bwd=rounds, grad=rounds, weight=None if weights == FULL else weights)


def points_of(run: Run) -> FivePoint | None:
    """The points of every layer: the backward pass rounds, and if weights are rounded, both passes do."""
    return None if run.format == FULL else _backward(run.format, run.rounding, run.weights)


def training_of(run: Run) -> Training:
    """Steps, batch and loss scale of a run."""
    if run.loss_scale == PLAIN:
        return Training(run.steps, run.batch, run.micro_batches, 1.0)
    # The loss of each prediction has the same factor, whatever the batch and its parts.
    scale = nets.in_range(run.format, run.model) * run.batch * predictions(run.model)
    return Training(run.steps, run.batch, run.micro_batches, scale)


class BatchSizeStudy(TrialStudy[Settings]):
    """Train a net at several batch sizes with a low-precision backward pass."""

    name = "batch-size"
    question = "Does a larger batch buy back bits of precision?"
    source = f"{_PAPER}, Figures 1, 5 and 6, Tables 1 to 3"
    settings = Settings
    shared = ("data", "model", "steps", "rate", "looks", "weights")
    added: ClassVar[dict[str, Any]] = {"model": OWN, "looks": 10, "weights": FULL}

    #: Two batch sizes, few steps.
    quick_form = Settings(batches=(16, 128), designs=(STEPS,), steps=50, seeds=2)

    #: For a GPU: five batch sizes.
    full_form = Settings(formats=("e4m0", "e4m1", "e4m2"), batches=(8, 32, 128, 512, 2048), steps=1000, seeds=5)

    def check(self, settings: Settings) -> None:
        """Both roundings, and formats and batch sizes in order."""
        require(settings, "roundings", {"stochastic", "nearest"} <= set(settings.roundings), "contain stochastic and nearest")
        require(settings, "model", settings.model in MODELS, f"be one of {', '.join(MODELS)}")
        require_increasing(settings, "batches")
        bits = [qsim.format(name).bits for name in settings.formats]
        require(settings, "formats", bits and bits == sorted(bits), "be at least one, from coarse to fine")
        require(settings, "looks", settings.looks >= 1, "be at least 1")
        require_among(settings, "designs", DESIGNS)
        require_among(settings, "scales", [*SCALES])
        qsim.format(settings.weights)

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """Every format, rounding and batch size, with and without a loss scale; full precision once; and the factor for each bit."""
        rounded = list(product(settings.formats, settings.roundings, settings.scales))
        # Both designs share the middle batch size.
        for design, batch in product(settings.designs, settings.batches):
            for name, rounding, scale in ((FULL, "nearest", PLAIN), *rounded):
                yield trained(settings, name, rounding, batch, scale, design)
        if settings.micro_batches > 1:
            most, design = settings.batches[-1], settings.designs[0]
            yield trained(settings, settings.formats[0], "stochastic", most, IN_RANGE, design, settings.micro_batches)
        common = {"rounding": "stochastic", "batch": settings.middle, "micro_batches": 1, "looks": 10, "weights": FULL}
        for (few, fine), scale in product(pairwise(settings.formats), settings.scales):
            yield {**common, "like": fine, "format": few, "loss_scale": scale}

    def work(self, run: Run) -> float:
        """A constant per step, plus a term per image."""
        if run.like:
            return float((_BATCHES * (2 * _DRAWS + 1) + run.steps / 10) * (100 + run.batch) * 2)
        return float(run.steps * (run.micro_batches * 100 + run.batch) * (1 if run.format == FULL else 2))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train and test the net, or measure the factor."""
        if run.like:
            return _factor(run, device)
        return nets.outcome(run, points_of(run), device, training_of(run))


def trained(settings: Settings, format: str, rounding: str, batch: int, scale: str, design: str, micro_batches: int = 1) -> dict[str, Any]:
    """The values of runs that train a net. Full precision is the same with every rounding and loss scale."""
    if format == FULL:
        rounding, scale = "nearest", PLAIN
    weights, steps = FULL if format == FULL else settings.weights, settings.updates(design, batch)
    way = {"format": format, "rounding": rounding, "batch": batch, "micro_batches": micro_batches, "loss_scale": scale}
    return {"like": "", **way, "weights": weights, "steps": steps}


def _factor(run: Run, device: torch.device) -> dict[str, Any]:
    """The factor by which the batch must grow, from the variances of a net's gradients after a tenth of its training."""
    how = replace(training_of(run), steps=run.steps // 10)
    points, like = (_backward(name, run.rounding) for name in (run.format, run.like))
    factor = nets.batch_factor(run, points, like, how, device, batches=_BATCHES, draws=_DRAWS)
    return {"factor": float(factor.value), "low": float(factor.low), "high": float(factor.high)}
