"""The logits of a model and the experts that it chooses, and how far those of two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qsim.nn.examples import inputs_of
from qsim.nn.restoring import generators_restored


@dataclass(frozen=True)
class Rollout:
    """The results of a model for a batch.

    Attributes:
        logits: The logits, of shape (sequences, tokens, vocabulary).
        experts: The sets of experts of each call of a mixture, sorted.
    """

    logits: Tensor
    experts: list[Tensor]


@dataclass(frozen=True)
class Differences:
    """The differences between training and serving; see `ComponentGap`."""

    kl: float
    mean: float
    largest: float
    top: float
    experts: float
    log_ratios: Tensor


def tokens_of(batch: Any) -> tuple[Tensor, Tensor]:
    """The tokens of a batch, and which of them are no padding.

    Raises:
        ValueError: If there are none.
    """
    args, kwargs = inputs_of(batch)
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2 or tokens.shape[1] < 2:
        found = f"{tokens.dtype} of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else repr(tokens)
        raise ValueError(f"twin: a batch must have token ids of shape (sequences, tokens), at least two tokens each, got {found}")
    mask = kwargs.get("attention_mask")
    return tokens, torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()


@torch.no_grad()
def rollout(model: nn.Module, batch: Any, options: Mapping[str, Any]) -> Rollout:
    """Run a model in evaluation mode, and leave no trace in it.

    Args:
        model: The model.
        batch: Its inputs.
        options: More arguments by keyword.
    """
    args, kwargs = inputs_of(batch)
    given = {name: value for name, value in kwargs.items() if name != "labels"} | dict(options)
    with _evaluating(model), generators_restored(model), _chosen_experts(model) as experts:
        output = model(*args, **given)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ValueError(f"twin: the model must return logits of shape (sequences, tokens, vocabulary), got {type(output).__name__}")
    return Rollout(logits, experts)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _chosen_experts(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the experts of each token: mixtures call a module `experts` with the indices, one row per token."""
    found: list[Tensor] = []

    def called(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        indices = next((x for x in given if x.dtype in (torch.int64, torch.int32) and x.dim() == 2), None)
        if indices is not None:
            found.append(indices.sort(-1).values)

    modules = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
    handles = [module.register_forward_pre_hook(called, with_kwargs=True) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def differences(training: Rollout, serving: Rollout, tokens: Tensor, mask: Tensor) -> Differences:
    """Compare two runs, one sequence at a time, because logits are large."""
    counted = (mask[:, 1:] & mask[:, :-1]).to(training.logits.device)
    ratios = torch.zeros(counted.shape, dtype=torch.float64)
    kl, changed = 0.0, 0
    for i, (row, kept) in enumerate(zip(tokens.to(counted.device), counted, strict=True)):
        ours, theirs = (run.logits[i, :-1].double().log_softmax(-1) for run in (training, serving))
        change = (theirs - ours).gather(-1, row[1:].long().unsqueeze(-1)).squeeze(-1)
        ratios[i] = change.where(kept, 0.0).cpu()
        kl += float((theirs.exp() * (theirs - ours)).sum(-1).where(kept, 0.0).sum())
        changed += int((theirs.argmax(-1) != ours.argmax(-1)).logical_and(kept).sum())
    count = int(counted.sum())
    sizes = ratios.abs()
    mean = float(sizes.sum()) / count
    return Differences(kl / count, mean, float(sizes.max()), changed / count, _flipped(training, serving, mask), ratios.float())


def _flipped(training: Rollout, serving: Rollout, mask: Tensor) -> float:
    """The share of tokens and mixtures with another set of experts; NaN without any."""
    flips = total = 0
    for ours, theirs in zip(training.experts, serving.experts, strict=True):
        kept = mask.flatten().to(ours.device)
        differ = (ours != theirs).any(-1)
        differ = differ[kept] if len(kept) == len(differ) else differ
        flips, total = flips + int(differ.sum()), total + len(differ)
    return flips / total if total else math.nan
