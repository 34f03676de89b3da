"""Batch size against precision: does a larger batch compensate for fewer bits in the backward pass, and for which rounding?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

import qsim
from qsim import FivePoint, Quantizer
from qsim.studies.choices import choice, require, require_among, require_increasing
from qsim.studies.learners import nets
from qsim.studies.learners.examples import MODELS, OWN, predictions
from qsim.studies.learners.training import Training
from qsim.studies.study import WrittenStudy, run_of

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
    rate: float = choice(0.1, "constant learning rate of plain SGD; of Adam for a GPT, unless it is pretrained-sgd")
    looks: int = choice(10, "how often the true gradient is measured in the last quarter of the steps")
    seeds: int = choice(6, "number of seeds")

    @property
    def middle(self) -> int:
        """The batch size at which variances are measured, and whose number of images all have if these are equal."""
        return self.batches[len(self.batches) // 2]

    def updates(self, design: str, batch: int) -> int:
        """The number of updates with a batch size."""
        return self.steps if design == STEPS else max(1, round(self.steps * self.middle / batch))


@dataclass(frozen=True)
class Run:
    """One net: trained if `like` is empty; otherwise the factor by which its gradients vary more than in the format `like` is measured."""

    data: str
    like: str
    format: str
    rounding: str
    batch: int
    micro_batches: int
    loss_scale: str
    steps: int
    rate: float
    seed: int
    # Last, with defaults, because results of earlier versions do not have them.
    model: str = OWN
    looks: int = 10
    weights: str = FULL

    @property
    def points(self) -> FivePoint | None:
        """The points of every layer: the backward pass rounds, and if weights are rounded, both passes do."""
        return None if self.format == FULL else _backward(self.format, self.rounding, self.weights)

    @property
    def training(self) -> Training:
        """Steps, batch and loss scale."""
        if self.loss_scale == PLAIN:
            return Training(self.steps, self.batch, self.micro_batches, 1.0)
        # The loss of each prediction has the same factor, whatever the batch and its parts.
        scale = nets.in_range(self.format, self.model) * self.batch * predictions(self.model)
        return Training(self.steps, self.batch, self.micro_batches, scale)


def _backward(format: str, rounding: str, weights: str = FULL) -> FivePoint:
    """Points that round inputs and gradients in the backward pass, as in Figure 3 of the paper, and weights if they have a format."""
    rounds = Quantizer(format, rounding)
    return FivePoint(act_bwd=rounds, grad=rounds, weight=None if weights == FULL else weights)


class BatchSizeStudy(WrittenStudy[Settings, Run]):
    """Train a net at several batch sizes with a low-precision backward pass."""

    name = "batch-size"
    question = "Does a larger batch buy back bits of precision?"
    source = f"{_PAPER}, Figures 1, 5 and 6, Tables 1 to 3"
    settings = Settings
    run = Run

    def quick(self) -> Settings:
        """Two batch sizes, few steps."""
        return Settings(batches=(16, 128), designs=(STEPS,), steps=50, seeds=2)

    def full(self) -> Settings:
        """Return the settings for a GPU: five batch sizes."""
        return Settings(formats=("e4m0", "e4m1", "e4m2"), batches=(8, 32, 128, 512, 2048), steps=1000, seeds=5)

    def runs(self, settings: Settings) -> Sequence[Run]:
        """Every format, rounding and batch size, with and without a loss scale; full precision once; and the factor for each bit."""
        require(settings, "roundings", {"stochastic", "nearest"} <= set(settings.roundings), "contain stochastic and nearest")
        require(settings, "model", settings.model in MODELS, f"be one of {', '.join(MODELS)}")
        require_increasing(settings, "batches")
        bits = [qsim.format(name).bits for name in settings.formats]
        require(settings, "formats", bits and bits == sorted(bits), "be at least one, from coarse to fine")
        require(settings, "looks", settings.looks >= 1, "be at least 1")
        require_among(settings, "designs", DESIGNS)
        require_among(settings, "scales", [*SCALES])
        qsim.format(settings.weights)
        found = [run for seed in range(settings.seeds) for run in _runs(settings, seed)]
        # Both designs share the middle batch size.
        return list(dict.fromkeys(found))

    def work(self, run: Run) -> float:
        """A constant per step, plus a term per image."""
        if run.like:
            return (_BATCHES * (2 * _DRAWS + 1) + run.steps / 10) * (100 + run.batch) * 2
        return run.steps * (run.micro_batches * 100 + run.batch) * (1 if run.format == FULL else 2)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train and test the net, or measure the factor."""
        if run.like:
            return _factor(run, device)
        return nets.outcome(run.data, run.points, run.training, run.rate, run.seed, device, model=run.model, looks=run.looks)


def trained(settings: Settings, format: str, rounding: str, batch: int, scale: str, design: str, seed: int, micro_batches: int = 1) -> Run:
    """The run of a net that is trained. Full precision is the same with every rounding and loss scale."""
    if format == FULL:
        rounding, scale = "nearest", PLAIN
    weights = FULL if format == FULL else settings.weights
    way = {"like": "", "format": format, "rounding": rounding, "batch": batch, "loss_scale": scale, "micro_batches": micro_batches}
    return run_of(Run, settings, **way, weights=weights, steps=settings.updates(design, batch), seed=seed)


def _runs(settings: Settings, seed: int) -> list[Run]:
    ways = [(FULL, "nearest", PLAIN)]
    ways += [(name, rounding, scale) for name in settings.formats for rounding in settings.roundings for scale in settings.scales]
    found = [
        trained(settings, name, rounding, batch, scale, design, seed)
        for design in settings.designs
        for batch in settings.batches
        for name, rounding, scale in ways
    ]
    if settings.micro_batches > 1:
        most, design = settings.batches[-1], settings.designs[0]
        found.append(trained(settings, settings.formats[0], "stochastic", most, IN_RANGE, design, seed, settings.micro_batches))
    shared = {"rounding": "stochastic", "batch": settings.middle, "micro_batches": 1, "looks": 10, "weights": FULL, "seed": seed}
    return found + [
        run_of(Run, settings, like=fine, format=few, loss_scale=scale, **shared)
        for few, fine in pairwise(settings.formats)
        for scale in settings.scales
    ]


def _factor(run: Run, device: torch.device) -> dict[str, Any]:
    """The factor by which the batch must grow, from the variances of a net's gradients after a tenth of its training."""
    how = replace(run.training, steps=run.steps // 10)
    points, like = (_backward(name, run.rounding) for name in (run.format, run.like))
    factor = nets.batch_factor(run.data, points, like, how, run.rate, run.seed, device, model=run.model, batches=_BATCHES, draws=_DRAWS)
    return {"factor": float(factor.value), "low": float(factor.low), "high": float(factor.high)}
