"""Training of one GPT in some mixture of BF16 and FP32: its final loss, speed and memory."""

from __future__ import annotations

import gc
import math
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import qsim
from qsim.studies.learners.gpt import GPT, language_loss, size
from qsim.studies.learners.gpt_training import BETAS, parameter_groups, rate_at, warmup
from qsim.studies.learners.text import Text, text
from qsim.studies.study import Run

#: Weights in FP32 with products in BF16 by autocast; weights in BF16 with updates of an FP32 copy. Other methods are all in BF16.
O1, O2 = "o1", "o2"
BF16, FP32 = "bf16", "fp32"
MIB = 2**20
#: nanoGPT's settings, which the paper uses.
_CLIP = 1.0
#: How often a model is validated, and on how many sequences of the held-out text.
_LOOKS, _VALIDATION = 5, 64
_DTYPES = {BF16: torch.bfloat16, FP32: torch.float32}


def outcome(run: Run, device: torch.device) -> dict[str, Any]:
    """Train the GPT.

    Returns:
        `curve`: pairs of steps done and the mean loss on the held-out text then, in nats per byte. `loss`: the last of them.
        If it is timed, `tokens_per_second`: in training, without warm-up and validation; and `peak_mib`: the most memory that torch
        had allocated at one time, beyond what was allocated before; None without a GPU.
    """
    found = text(run.data, run.context, device, run.tokens)
    held_out = found.validation(_VALIDATION, run.context)
    before = _allocated(device)
    torch.manual_seed(run.seed)
    with device:
        model = GPT(size(run.size), run.vocabulary, run.context)
    updates = WeightUpdater(run, model)
    order = torch.Generator().manual_seed(run.seed)
    curve, seconds = [], 0.0
    for first, last in pairwise([0, *_looks(run)]):
        begin = time.perf_counter()
        for step in range(first, last):
            _learn(run, model, updates, found, order, rate_at(run.rate, run.steps, step))
        _wait(device)
        seconds += time.perf_counter() - begin if first else 0.0
        curve.append((last, _validated(run, model, held_out)))
    learnt = {"loss": curve[-1][1], "curve": curve}
    if not run.timed:
        return learnt
    return {
        **learnt,
        "tokens_per_second": (run.steps - warmup(run.steps)) * run.batch * run.context / seconds,
        "peak_mib": (torch.cuda.max_memory_allocated(device) - before) / MIB if device.type == "cuda" else None,
    }


class WeightUpdater:
    """Update a model's weights with clipped gradients, by AdamW as a method does it.

    Weights get the method's dtype; all methods begin with the same values, which BF16 can represent.

    Args:
        run: The method, and the formats of states and gradients.
        model: The model that is trained.

    Attributes:
        weights: The model's parameters.
        moved: The tensors that the optimizer updates: the weights, or copies of them in FP32.
        optimizer: The optimizer.
    """

    def __init__(self, run: Run, model: nn.Module) -> None:
        model.bfloat16()
        if run.method == O1:
            model.float()
        self.weights: list[Tensor] = list(model.parameters())
        self.moved = self.weights
        if run.method == O2:
            self.moved = [weight.detach().float() for weight in self.weights]
        dtype = _DTYPES[run.gradients]
        if dtype != self.weights[0].dtype and not hasattr(torch.Tensor, "grad_dtype"):
            raise RuntimeError(
                f"llm: gradients in {run.gradients} of weights in BF16 need torch 2.10 or later; this is {torch.__version__}"
            )
        for weight in self.weights:
            # Autograd accumulates the gradients of micro-batches in this dtype.
            weight.grad_dtype = dtype
        groups = parameter_groups(self.moved)
        self.optimizer: torch.optim.Optimizer
        if run.method in (O1, O2):
            self.optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=self.weights[0].is_cuda)
        else:
            self.optimizer = qsim.optim.AdamW(groups, betas=BETAS, update=run.method, state=run.states, seed=run.seed)

    def step(self, rate: float) -> None:
        """Update the weights, and release the gradients."""
        nn.utils.clip_grad_norm_(self.weights, _CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        copied = self.moved[0] is not self.weights[0]
        if copied:
            for copy, weight in zip(self.moved, self.weights, strict=True):
                copy.grad, weight.grad = weight.grad, None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if copied:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.moved)


def _learn(run: Run, model: nn.Module, updates: WeightUpdater, found: Text, order: torch.Generator, rate: float) -> None:
    for part in found.batch(run.batch, run.context, order).chunk(run.micro_batches):
        (_loss(run, model, part) / run.micro_batches).backward()
    updates.step(rate)


def _loss(run: Run, model: nn.Module, sequences: Tensor) -> Tensor:
    with torch.autocast(sequences.device.type, torch.bfloat16, enabled=run.method == O1):
        return language_loss(model, sequences)


@torch.no_grad()
def _validated(run: Run, model: nn.Module, held_out: Tensor) -> float:
    parts = held_out.split(max(1, run.batch // run.micro_batches))
    loss = sum(float(_loss(run, model, part)) * len(part) for part in parts) / len(held_out)
    return loss if math.isfinite(loss) else math.inf


def _looks(run: Run) -> list[int]:
    """The steps after which a model is validated: after the warm-up, and then at equal distances up to the last."""
    warm = warmup(run.steps)
    return sorted({warm + round((run.steps - warm) * part / _LOOKS) for part in range(_LOOKS + 1)})


def _allocated(device: torch.device) -> int:
    """The memory that is already allocated, from which the peak is counted. Earlier runs must not have left any."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
