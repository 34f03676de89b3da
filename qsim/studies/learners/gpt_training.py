"""Training of a GPT on text in several precisions: which tensors are float32 or bfloat16, and how weights are updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import qsim
from qsim.studies.learners.gpt import GPT, language_loss, parameters, size
from qsim.studies.learners.text import LIBRARY, PACKAGES, VOCABULARY, Text

#: Everything in bfloat16, named by the update of weights; or float32 weights and updates, with products in bfloat16.
STOCHASTIC, KAHAN, NEAREST = "stochastic", "kahan", "nearest"
MIXED = "mixed"
METHODS = (MIXED, STOCHASTIC, KAHAN, NEAREST)
#: Float32 throughout: for models whose layers round by themselves.
SINGLE = "float32"
#: Of AdamW.
BETAS, DECAY = (0.9, 0.95), 0.1


@dataclass(frozen=True)
class GPTTraining:
    """The training of a GPT.

    Attributes:
        size: The size of the GPT; see `gpt.SIZES`.
        method: One of `METHODS`.
        rate: The highest learning rate of AdamW. It rises linearly, then decays along half a cosine to a tenth.
        steps: The number of updates; the rate rises during the first tenth of them.
        batch: Sequences per update.
        context: Their length.
        clip: The largest norm of all gradients; 0: no clipping.
        seed: The seed of the initial weights, of the batches and of rounding.
        loss_scale: A factor of the loss in the backward pass, by which gradients are divided afterwards.
    """

    size: str
    method: str
    rate: float
    steps: int
    batch: int
    context: int
    clip: float
    seed: int
    loss_scale: float = 1.0

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return rate_at(self.rate, self.steps, step)


def warmup(steps: int) -> int:
    """The number of steps during which the learning rate rises."""
    return max(1, steps // 10)


def rate_at(highest: float, steps: int, step: int) -> float:
    """The learning rate of a step, counted from 0: a linear warm-up, then half a cosine down to a tenth."""
    rising = warmup(steps)
    if step < rising:
        return highest * (step + 1) / rising
    way = (step - rising) / max(1, steps - rising)
    return highest * (0.55 + 0.45 * math.cos(math.pi * way))


def begin(how: GPTTraining, device: torch.device) -> tuple[GPT, torch.optim.Optimizer]:
    """A model and its optimizer. All methods begin with the same weights, which are bfloat16 numbers.

    Raises:
        ValueError: If the size or the method is unknown.
    """
    if how.method not in METHODS:
        raise ValueError(f"method: must be one of {', '.join(METHODS)}; got {how.method!r}")
    torch.manual_seed(how.seed)
    model = GPT(size(how.size), VOCABULARY, how.context).bfloat16().to(device)
    if how.method == MIXED:
        model.float()
        return model, adamw(model, how.rate)
    groups = parameter_groups(list(model.parameters()))
    return model, qsim.optim.AdamW(groups, lr=how.rate, betas=BETAS, update=how.method, seed=how.seed)


def described(names: Sequence[str], vocabulary: int, context: int, data: str, tokens: int = VOCABULARY) -> str:
    """A GPT of one or more sizes and its text, with its number of parameters.

    Example:
        >>> described(["tiny"], 256, 64, "library")
        "A GPT (tiny: 2 blocks, width 64, 2 heads; 120,576 parameters) learns bytes of the sources of Python's standard library"
    """
    text = {LIBRARY: "the sources of Python's standard library", PACKAGES: "sources and texts of installed packages"}.get(data, data)
    learns = "bytes" if tokens == VOCABULARY else "byte pairs"
    found = [
        f"{name}: {own.layers} blocks, width {own.width}, {own.heads} heads; {parameters(own, vocabulary, context):,} parameters"
        for name, own in zip(names, map(size, names), strict=True)
    ]
    return f"A GPT ({', or '.join(found)}) learns {learns} of {text}"


def variant(name: str, vocabulary: int, context: int) -> str:
    """A GPT in a few words, for titles; empty for the smallest.

    Example:
        >>> variant("mini", 256, 128), variant("tiny", 256, 64)
        ('A GPT with 842,496 parameters', '')
    """
    return "" if name == "tiny" else f"A GPT with {parameters(size(name), vocabulary, context):,} parameters"


def parameter_groups(weights: Sequence[Tensor]) -> list[dict[str, Any]]:
    """The optimizer's parameter groups: matrices decay, as in nanoGPT; biases and normalization weights do not."""
    return [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": DECAY},
        {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """AdamW in full precision, as nanoGPT sets it."""
    weights = list(model.parameters())
    return torch.optim.AdamW(parameter_groups(weights), lr=rate, betas=BETAS, fused=weights[0].is_cuda)


def train_gpt(
    how: GPTTraining, model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, look: Callable[[int, Tensor], None] | None = None
) -> torch.Generator:
    """Train a model in place.

    Args:
        how: The training.
        model: A model that returns logits.
        optimizer: The optimizer of its parameters.
        text: The training text.
        look: Called after each backward pass, before the update, with the number of updates done and the loss.

    Returns:
        The generator of the batches, which can draw more.
    """
    order = torch.Generator().manual_seed(how.seed)
    for step in range(how.steps):
        optimizer.zero_grad()
        loss = autocast_loss(how.method, model, text.batch(how.batch, how.context, order))
        (loss * how.loss_scale).backward()
        if how.loss_scale != 1:
            torch._foreach_div_([weight.grad for weight in model.parameters() if weight.grad is not None], how.loss_scale)
        if look is not None:
            look(step, loss.detach())
        if how.clip:
            nn.utils.clip_grad_norm_(model.parameters(), how.clip)
        for group in optimizer.param_groups:
            group["lr"] = how.rate_at(step)
        optimizer.step()
    return order


@torch.no_grad()
def validation_loss(how: GPTTraining, model: nn.Module, text: Text, count: int) -> float:
    """The mean loss on sequences of the held-out text; infinite if it is NaN."""
    parts = text.validation(count, how.context).split(how.batch)
    found = torch.stack([autocast_loss(how.method, model, part).double() * len(part) for part in parts]).sum().item() / count
    return found if math.isfinite(found) else math.inf


def autocast_loss(method: str, model: nn.Module, sequences: Tensor) -> Tensor:
    """The loss, computed in the precision of a method."""
    with torch.autocast(sequences.device.type, torch.bfloat16, enabled=method == MIXED):
        return language_loss(model, sequences)
