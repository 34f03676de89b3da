"""One run: a fresh model, its training, and the results."""

from __future__ import annotations

import gc
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qsim
from gpt import checkpoints
from gpt.methods import Updates, autocast, to_dtype
from gpt.model import GPT, Size
from gpt.progress import Progress
from gpt.text import Text
from gpt.world import World

# Settings that a resumed run may change: none affects what is learned, apart from the order of sums.
CHANGEABLE = ("micro_batch", "compile", "evaluate_every", "validation", "checkpoint", "save_every", "losses", "first")


@dataclass(frozen=True)
class Settings:
    """The settings of a run; `train_gpt.py --help` describes each."""

    size: Size
    vocabulary: int
    context: int
    method: str
    recipe: str | None
    lr: float
    seed: int
    steps: int
    batch: int
    micro_batch: int
    warmup: int
    betas: tuple[float, float]
    weight_decay: float
    clip: float
    compile: bool
    evaluate_every: int
    validation: int
    checkpoint: Path | None
    save_every: int
    losses: Path | None
    first: int = 0

    def lasting(self) -> dict[str, Any]:
        """The settings that must be unchanged when a run is resumed, as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items() if name not in CHANGEABLE}

    def is_saved(self, done: int) -> bool:
        """Whether the run is saved after a number of steps."""
        return done == self.steps or (self.save_every > 0 and done % self.save_every == 0)

    def is_validated(self, done: int) -> bool:
        """Whether there is a validation after a number of steps; there is always one at the end."""
        return done < self.steps and self.evaluate_every > 0 and done % self.evaluate_every == 0

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warmup, then cosine decay to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        way = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * way)))


def train(settings: Settings, world: World, text: Text) -> dict[str, Any]:
    """Train, and return the line of results."""
    # Nothing of a previous run may remain: neither its compiled code nor its memory.
    torch.compiler.reset()
    gc.collect()
    model = _model(settings, world)
    updates = Updates(
        settings.method, model, betas=settings.betas, weight_decay=settings.weight_decay, clip=settings.clip, seed=settings.seed
    )
    if settings.checkpoint is not None and settings.first:
        checkpoints.load(settings.checkpoint, settings.first, updates, world)
    world.forget_peak()
    progress = Progress(world, f"{settings.method} lr {settings.lr:g}", settings.first, settings.steps, settings.batch * settings.context)
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    for step in range(settings.first, settings.steps):
        with progress.step(loss):
            _learn(loss, step, model, updates, text, settings, world)
        done = step + 1
        # Saved first: after a validation some of a sharded model's weights are whole.
        if settings.checkpoint is not None and settings.is_saved(done):
            with progress.paused():
                checkpoints.save(settings.checkpoint, done, updates, world)
        if settings.is_validated(done):
            with progress.paused():
                progress.tell(f"step {done:>6}  validation loss {validate(model, text, settings, world):.4f}")
    progress.close()
    if settings.losses is not None and world.rank == 0:
        settings.losses.write_text("".join(f"{value!r}\n" for value in progress.losses))
    found = validate(model, text, settings, world)
    return {
        "method": settings.method,
        "recipe": settings.recipe,
        "lr": settings.lr,
        "seed": settings.seed,
        "steps": settings.steps,
        "tokens": settings.steps * settings.batch * settings.context,
        "training_loss": world.mean(loss) if settings.first < settings.steps else None,
        "validation_loss": found,
        # Infinite where `math.exp` would raise an error.
        "perplexity": torch.tensor(found, dtype=torch.float64).exp().item(),
        "tokens_per_second": progress.tokens_per_second(),
        "peak_mib": world.peak_mib(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ranks": world.size,
    }


@torch.no_grad()
def validate(model: nn.Module, text: Text, settings: Settings, world: World) -> float:
    """The mean loss on the held-out text."""
    parts = _parts(text.validation(settings.validation), settings, world)
    return world.mean(torch.stack([_loss(model, part, settings, world) for part in parts]).double().mean())


def _learn(loss: Tensor, step: int, model: nn.Module, updates: Updates, text: Text, settings: Settings, world: World) -> None:
    """One training step; returns this process's loss as a tensor."""
    loss.zero_()
    parts = _parts(text.batch(settings.batch, settings.seed, step), settings, world)
    for part in parts:
        share = _loss(model, part, settings, world) / len(parts)
        share.backward()
        loss += share.detach()
    updates.step(settings.rate(step))


def _model(settings: Settings, world: World) -> nn.Module:
    torch.manual_seed(settings.seed)
    with world.device:
        model = GPT(settings.size, settings.vocabulary, settings.context)
    to_dtype(model, settings.method)
    if settings.recipe is not None:
        qsim.convert(model, settings.recipe)
    if settings.compile:
        model.compile_parts()
    world.shard(model)
    return model


def _parts(sequences: Tensor, settings: Settings, world: World) -> list[Tensor]:
    """This process's share of some sequences, in micro-batches."""
    return list(sequences.split(settings.micro_batch))[world.rank :: world.size]


def _loss(model: nn.Module, sequences: Tensor, settings: Settings, world: World) -> Tensor:
    tokens = sequences.long()
    with autocast(settings.method, world.device):
        return model(tokens[:, :-1], tokens[:, 1:])
