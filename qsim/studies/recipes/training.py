"""Training of a model in one recipe: its loss, the errors of its gradients, and the time of a step."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from qsim.studies.learners.gpt import GPT, size
from qsim.studies.learners.gpt_training import MIXED, GPTTraining, adamw, autocast_loss, train_gpt, validation_loss
from qsim.studies.learners.mixture import MixtureGPT
from qsim.studies.learners.text import VOCABULARY, text
from qsim.studies.recipes import BF16, LOSS_SCALE, MIXTURE, recipe_of
from qsim.studies.study import Run

#: Held-out sequences, and the largest norm of all gradients.
_VALIDATION, _CLIP = 64, 1.0


def trained(run: Run, device: torch.device) -> dict[str, Any]:
    """Train a model.

    Returns:
        `loss`: in nats per byte of held-out text, in the recipe's own precision. `gradients`: for each look the step, and the squared bias
        and the variance of the gradient relative to its square in full precision. `share`: that of multiply-adds with rounded operands.
    """
    words, how = text(run.data, run.context, device), training_of(run)
    held_out = words.validation(run.batch, run.context)
    model, plain, rounded = _model(run, device), _model(run, device, BF16), _model(run, device)
    gradients: list[list[float]] = []

    def look(step: int, loss: Tensor) -> None:
        if (step + 1) * run.looks // run.steps > step * run.looks // run.steps:
            for copy in (plain, rounded):
                _copy(model, copy)
            gradients.append(
                [step + 1, *gradient_errors(plain, rounded, held_out, run.draws, run.seed, lambda: _copy(model, rounded), how.loss_scale)]
            )

    train_gpt(how, model, adamw(model, run.rate), words, look)
    return {"loss": validation_loss(how, model, words, _VALIDATION), "gradients": gradients, "share": _share(run, model, held_out)}


def timing(run: Run, device: torch.device) -> dict[str, Any]:
    """The median time of a step in milliseconds, after as many that are not timed."""
    words, model = text(run.data, run.context, device), _model(run, device)
    ends: list[float] = []

    def look(step: int, loss: Tensor) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ends.append(time.perf_counter())

    train_gpt(training_of(run, 2 * run.steps), model, adamw(model, run.rate), words, look)
    return {"milliseconds": 1e3 * median(b - a for a, b in zip(ends[run.steps - 1 :], ends[run.steps :], strict=False))}


def gradient_errors(
    plain: nn.Module, rounded: nn.Module, sequences: Tensor, draws: int, seed: int, again: Any, loss_scale: float = 1.0
) -> tuple[float, float]:
    """The squared bias and the variance of a rounded model's gradient, relative to the squared gradient of the same model unrounded.

    Args:
        plain: The model without rounding.
        rounded: The same model with rounding.
        sequences: The batch.
        draws: The number of times that the gradient is rounded.
        seed: The seed of the noise.
        again: Called before each draw, to write the weights again, which draws their noise again.
        loss_scale: A factor of the loss in the backward pass.
    """
    exact = _gradient(plain, sequences, loss_scale)
    mean, squares = [torch.zeros_like(part) for part in exact], 0.0
    with torch.random.fork_rng(devices=[sequences.device] if sequences.is_cuda else []):
        for draw in range(draws):
            torch.manual_seed(qsim.random.stream("leaderboard", seed, draw))
            again()
            drawn = _gradient(rounded, sequences, loss_scale)
            squares += _square(drawn)
            torch._foreach_add_(mean, drawn, alpha=1 / draws)
    variance = max(0.0, (squares - draws * _square(mean)) / (draws - 1))
    # The square of a mean of several draws contains their variance.
    bias = _square(torch._foreach_sub(mean, exact)) - variance / draws
    return bias / _square(exact), variance / _square(exact)


def _gradient(model: nn.Module, sequences: Tensor, loss_scale: float) -> list[Tensor]:
    """The gradient times the factor of the loss, which is the same for all that are compared."""
    model.zero_grad()
    (autocast_loss(MIXED, model, sequences) * loss_scale).backward()
    return [torch.zeros_like(weight) if weight.grad is None else weight.grad.detach() for weight in model.parameters()]


def _square(tensors: Any) -> float:
    return float(torch.stack([part.double().square().sum() for part in tensors]).sum())


@torch.no_grad()
def _copy(source: nn.Module, target: nn.Module) -> None:
    for own, other in zip(target.parameters(), source.parameters(), strict=True):
        own.copy_(other)


def _model(run: Run, device: torch.device, recipe: str = "") -> nn.Module:
    """The model in the run's recipe, or in another one; a router stays in high precision."""
    torch.manual_seed(run.seed)
    shape = size(run.size), VOCABULARY, run.context
    model = (MixtureGPT(*shape, experts=run.experts, active=run.active) if run.model == MIXTURE else GPT(*shape)).to(device)
    name = recipe or run.recipe
    return model if name == BF16 else qsim.convert(model, recipe_of(name), exclude="*router" if run.model == MIXTURE else None)


def training_of(run: Run, steps: int = 0) -> GPTTraining:
    """The training of a run, with another number of steps if one is given."""
    return GPTTraining(run.size, MIXED, run.rate, steps or run.steps, run.batch, run.context, _CLIP, run.seed, _loss_scale(run.recipe))


def _loss_scale(name: str) -> float:
    """The factor of the loss: gradients without scales need one, as their recipes say."""
    if name == BF16:
        return 1.0
    found = recipe_of(name)
    grad = (found if isinstance(found, FivePoint) else found.points).grad
    return LOSS_SCALE if isinstance(grad, Quantizer) and grad.scale is None and grad.format.bits < 16 else 1.0


def _share(run: Run, model: nn.Module, sequences: Tensor) -> float:
    if run.recipe == BF16:
        return 0.0
    with torch.autocast(sequences.device.type, torch.bfloat16):
        return qsim.coverage(model, sequences[:, :-1].long()).share
