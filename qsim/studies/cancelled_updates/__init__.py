"""Cancelled updates: how many of them rounding cancels while a net is trained, the cost in accuracy, and the memory that the fix needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import qsim
from qsim.diagnostics import cancelled_updates
from qsim.studies.choices import choice, require, require_among
from qsim.studies.learners.examples import OWN
from qsim.studies.learners.images import DIGITS, RESIDUAL, Images, images
from qsim.studies.learners.training import accuracy, full_precision, mean_loss
from qsim.studies.stagnation.least_squares import weight_dtype
from qsim.studies.study import Run, TrialStudy

FULL = "fp32"
NEAREST, STOCHASTIC, KAHAN = "nearest", "stochastic", "kahan"
#: Kahan summation whose weights are rounded stochastically.
BOTH = "kahan+stochastic"
UPDATES = {NEAREST: NEAREST, STOCHASTIC: STOCHASTIC, KAHAN: KAHAN, BOTH: qsim.optim.Kahan("stochastic")}
#: The number of hidden layers of the perceptron for digits, and their width.
_HIDDEN, _WIDTH = 4, 48


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice(DIGITS, "digits, or a folder with Fashion-MNIST's or CIFAR-10's files")
    model: str = choice(OWN, f"own (the net that suits the images), {', '.join(RESIDUAL)}")
    formats: tuple[str, ...] = choice(("fp16", "bf16", "e5m3"), "formats of the weights, from fine to coarse")
    updates: tuple[str, ...] = choice((NEAREST, STOCHASTIC, KAHAN), f"updates: {', '.join(UPDATES)}")
    arithmetic: str = choice("float32", "the optimizer's arithmetic: float32, or format, in which it rounds each of its operations")
    mixed: str = choice(
        "bf16", "the main format, in which some layers of the own net also have Kahan updates and the others stochastic ones"
    )
    units: tuple[str, ...] = choice(("bf16",), "formats in which everything is also computed with 32-bit weights and updates")
    rate: float = choice(0.02, "initial learning rate; it decays linearly to zero")
    momentum: float = choice(0.9, "momentum of SGD")
    decay: float = choice(0.0, "weight decay")
    steps: int = choice(400, "number of updates")
    batch: int = choice(64, "images per update")
    looks: int = choice(20, "number of steps whose updates are counted")
    curve: int = choice(0, "number of times at which loss and accuracy are measured during training")
    seeds: int = choice(6, "number of seeds")


class CancelledUpdatesStudy(TrialStudy[Settings]):
    """Train a net whose weights are rounded after each update, and count the updates that are lost."""

    name = "cancelled-updates"
    question = "How many weight updates does rounding cancel, and what restores them?"
    source = "Zamirai et al., Revisiting BFloat16 Training, Section 4, Figure 5, Appendix D.3"
    settings = Settings
    shared = ("data", "model", "arithmetic", "rate", "momentum", "decay", "steps", "batch", "looks", "curve")
    # Results of earlier versions do not have these.
    added: ClassVar[dict[str, Any]] = {"unit": "", "model": OWN, "arithmetic": "float32", "decay": 0.0, "curve": 0}

    #: Two formats, few steps.
    quick_form = Settings(formats=("bf16", "e5m3"), rate=0.1, steps=60, looks=12, seeds=1)

    #: More steps and seeds.
    full_form = Settings(steps=3000, looks=60, seeds=5)

    def check(self, settings: Settings) -> None:
        """Updates, formats and a model that fit one another."""
        require(settings, "mixed", settings.mixed in settings.formats, f"be one of the formats {', '.join(settings.formats)}")
        require(settings, "model", settings.model in (OWN, *RESIDUAL), f"be one of {', '.join((OWN, *RESIDUAL))}")
        require_among(settings, "updates", [*UPDATES])
        require(settings, "updates", settings.updates[:3] == (NEAREST, STOCHASTIC, KAHAN), "begin with nearest, stochastic, kahan")
        enough = 4 <= settings.looks <= settings.steps
        require(settings, "looks", enough, f"be at least 4, one per quarter, and at most the {settings.steps} steps")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """Every format and update; full precision, also in units; and in one format all mixtures of stochastic and Kahan updates."""
        layers = len(layers_of(net(images(settings.data, torch.device("cpu"))))) if settings.model == OWN else 1
        yield from (way(FULL, NEAREST, unit=unit) for unit in ("", *settings.units))
        yield from (way(name, update) for name, update in product(settings.formats, settings.updates))
        yield from (way(settings.mixed, STOCHASTIC, count) for count in range(1, layers))

    def work(self, run: Run) -> float:
        """A step takes about the same time whatever is rounded."""
        return float(run.steps * (1000 + run.batch))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train and count."""
        found = replace(images(run.data, device), model=run.model)
        torch.manual_seed(run.seed)
        dtype = torch.float32 if run.format == FULL else weight_dtype(run.format)
        own = replace(found, x=found.x.to(dtype), test_x=found.test_x.to(dtype))
        model = net(found).to(device, dtype)
        with torch.no_grad():
            for weight in model.parameters():
                qsim.quantize_(weight, run.format)
        optimizer = _optimizer(run, model)
        counted = cancelled_updates(optimizer, every=max(1, run.steps // run.looks), model=model)
        with full_precision(device), counted:
            curve = _train(run, model, optimizer, own)
            told, loss = accuracy(model, own), mean_loss(model, own.x, own.y)
        totals = [[entry.step, entry.updates, entry.cancelled, entry.carried] for entry in counted.totals]
        return {"accuracy": told, "loss": loss, "counts": totals, "memory": _memory(optimizer), **({"curve": curve} if run.curve else {})}


def way(format: str, update: str, kahan_layers: int = 0, unit: str = "") -> dict[str, Any]:
    """The values of runs of a net whose last layers have Kahan updates, whatever the update of the others."""
    return {"format": format, "update": update, "kahan_layers": kahan_layers, "unit": unit}


def net(found: Images) -> nn.Module:
    """The net for images: for digits a perceptron that is deeper than in other studies, because its layers are treated one by one."""
    height = found.x.shape[2]
    if height >= 16 or found.model in RESIDUAL:
        return found.net()
    widths = [height * height, *[_WIDTH] * _HIDDEN]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], found.classes))


def layers_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each layer that has any, in the model's order."""
    return [own for own in (list(layer.parameters(recurse=False)) for layer in model.modules()) if own]


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    layers = layers_of(model)
    first = len(layers) - run.kahan_layers
    groups = [
        {"params": [weight for layer in part for weight in layer], "update": UPDATES[update]}
        for part, update in ((layers[:first], run.update), (layers[first:], KAHAN))
        if part
    ]
    how: dict[str, Any] = {"momentum": run.momentum, "weight_decay": run.decay, "arithmetic": run.arithmetic}
    return qsim.optim.SGD(groups, lr=run.rate, **how, format=run.format, seed=run.seed)


def _train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, found: Images) -> list[tuple[int, float, float]]:
    """Train without a CUDA graph, whose updates could not be counted.

    Returns:
        Steps done, the mean loss of the batches since the last entry, and the test accuracy then.
    """
    order = torch.Generator().manual_seed(run.seed)
    curve: list[tuple[int, float, float]] = []
    losses: list[Tensor] = []
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = run.rate * (1 - step / run.steps)
        chosen = torch.randint(len(found.y), (run.batch,), generator=order).to(found.y.device)
        optimizer.zero_grad()
        with qsim.fpu(run.unit) if run.unit else nullcontext():
            weights = {name: _read(run, weight) for name, weight in model.named_parameters()}
            loss = F.cross_entropy(functional_call(model, weights, (_read(run, found.x[chosen]),)), found.y[chosen])
            loss.backward()
        optimizer.step()
        losses.append(loss.detach().float())
        if run.curve and (step + 1) * run.curve // run.steps > len(curve):
            curve.append((step + 1, float(torch.stack(losses).mean()), accuracy(model, found)))
            losses.clear()
    return curve


def _read(run: Run, x: Tensor) -> Tensor:
    """A weight or an input as operators read it."""
    return qsim.Quantizer(run.unit)(x) if run.unit else x


def _memory(optimizer: torch.optim.Optimizer) -> float:
    """Return the mean bytes per weight, including what Kahan summation stores, over all weights."""
    bytes_ = numbers = 0
    for group in optimizer.param_groups:
        for weight in group["params"]:
            kept = optimizer.state[weight].get("compensation")
            bytes_ += weight.numel() * weight.element_size() + (kept.numel() * kept.element_size() if kept is not None else 0)
            numbers += weight.numel()
    return bytes_ / numbers
