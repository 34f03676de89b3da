"""Training of a GPT whose linear layers round to E4M3, with the sums of an accumulator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer, scaling
from qsim.studies.accumulator import SINGLE, TRAINED, UNROUNDED
from qsim.studies.learners.gpt import GPT, GPTSize, language_loss
from qsim.studies.learners.gpt_training import SINGLE as FLOAT32, GPTTraining, adamw, train_gpt, validation_loss
from qsim.studies.learners.text import VOCABULARY, text
from qsim.studies.study import Run

#: The largest norm of all gradients, and the number of held-out sequences.
_CLIP, _VALIDATION = 1.0, 64


def outcome(run: Run, device: torch.device) -> dict[str, Any]:
    """Train the GPT.

    Returns:
        `loss`: the mean loss on the held-out text, in nats per byte. `gradients`, for float32 sums only: for each other accumulator,
        and without rounding, the norm of the change of the weights' gradients relative to their norm, of the trained model.
    """
    found = text(run.operands, run.context, device)
    model = begun(run, device)
    how = GPTTraining("", FLOAT32, run.rate, run.steps, run.batch, run.context, _CLIP, run.seed)
    order = train_gpt(how, model, adamw(model, run.rate), found)
    values: dict[str, Any] = {"loss": validation_loss(how, model, found, _VALIDATION)}
    if run.accumulate == SINGLE:
        values["gradients"] = gradient_errors(run, model, found.batch(run.batch, run.context, order))
    return values


def begun(run: Run, device: torch.device, accumulate: str = "") -> GPT:
    """A GPT with the run's weights. All layers of its blocks round; the embedding and the last layer do not.

    Args:
        run: The run.
        device: Where the model is.
        accumulate: Another accumulator than the run's.
    """
    torch.manual_seed(run.seed)
    model = GPT(GPTSize(run.layers, run.width, run.heads), VOCABULARY, run.context).to(device)
    chosen = accumulate or run.accumulate
    if chosen != UNROUNDED:
        qsim.convert(model, e4m3_points(chosen), exclude=["head"])
    return model


def e4m3_points(accumulate: str) -> FivePoint:
    """Inputs, weights and gradients in E4M3 with per-tensor scales, as an H100 multiplies them."""
    rounds = Quantizer("e4m3", scale=scaling.PerTensor())
    return FivePoint(
        rounds, rounds, act_bwd="same", weight_bwd="same", grad=rounds, accumulate=None if accumulate == SINGLE else accumulate
    )


def gradient_errors(run: Run, trained: nn.Module, sequences: Tensor) -> dict[str, float]:
    """The change of gradients under other sums, and without rounding, relative to those with float32 sums."""
    own = _gradients(trained, sequences)
    errors = {}
    for name in (UNROUNDED, *TRAINED):
        model = begun(run, sequences.device, name)
        model.load_state_dict(trained.state_dict())
        errors[name] = float((_gradients(model, sequences) - own).norm() / own.norm())
    return errors


def _gradients(model: nn.Module, sequences: Tensor) -> Tensor:
    """The gradients of all weights of layers that round."""
    weights = [module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "head"]
    loss = language_loss(model, sequences)
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, weights)])
