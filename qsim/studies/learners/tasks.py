"""Generated questions, and a GPT that has learnt text before, to be fine-tuned on them: stand-ins for benchmarks and large models."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsim.studies.learners import gpt_training
from qsim.studies.learners.gpt import GPT, size
from qsim.studies.learners.gpt_training import SINGLE, GPTTraining, adamw, train_gpt
from qsim.studies.learners.text import LIBRARY, VOCABULARY, LabelledBytes, Text, text

#: The GPT's size, and the bytes that it can read.
SIZE, CONTEXT = "mini", 64
#: Of the training on text: updates, sequences per update, the highest learning rate.
PRETRAINING, _BATCH, _RATE = 1000, 32, 2e-3
_QUESTIONS, _TEST = 4096, 1024
#: Bytes of a snippet, and of the part of it that may be reversed.
_SNIPPET, _REVERSED = 40, 8


class _Answer(nn.Module):
    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, x: Tensor) -> Tensor:
        """The logits of the byte that follows."""
        return cast(Tensor, self.gpt(x))[:, -1]


@lru_cache(maxsize=2)
def questions(task: str, device: torch.device) -> LabelledBytes:
    """A task, with a GPT that was trained on the sources of Python's standard library; the same ones each time.

    Raises:
        ValueError: If there is no such task.
    """
    if task not in TASKS:
        raise ValueError(f"data: must be one of {', '.join(TASKS)} for a pre-trained model; got {task!r}")
    found = text(LIBRARY, CONTEXT, device)
    order = torch.Generator().manual_seed(0)
    ask = TASKS[task][1]
    x, y = ask(found.batch(_QUESTIONS, _SNIPPET, order).cpu().long()[:, 1:], order)
    test_x, test_y = ask(found.validation(_TEST, _SNIPPET).cpu().long()[:, 1:], order)
    gpt = _pretrained(found, device)
    return LabelledBytes(x.to(device), y.to(device), test_x.to(device), test_y.to(device), lambda: _Answer(deepcopy(gpt)))


def described(task: str) -> str:
    """A task and the GPT, with its number of parameters.

    Example:
        >>> described("sums").partition(", ")[0]
        'A GPT (mini: 4 blocks'
    """
    gpt = gpt_training.described([SIZE], VOCABULARY, CONTEXT, LIBRARY)
    before = f"{gpt} in {PRETRAINING:,} updates of {_BATCH} sequences of {CONTEXT}, in full precision"
    return f"{before}. Then it is fine-tuned on {_QUESTIONS:,} questions, and tested on {_TEST:,} drawn alike: {TASKS[task][0]}"


def _sums(snippets: Tensor, order: torch.Generator) -> tuple[Tensor, Tensor]:
    """`3+1+4=`, answered by one of 28 letters."""
    digits = torch.randint(10, (len(snippets), 3), generator=order)
    asked = torch.stack([digits + ord("0"), torch.full_like(digits, ord("+"))], 2).flatten(1)
    asked[:, -1] = ord("=")
    return asked, digits.sum(1) + ord("A")


def _reversals(snippets: Tensor, order: torch.Generator) -> tuple[Tensor, Tensor]:
    """A snippet and `?`, answered by 1 if some of its bytes are in reverse order, else by 0."""
    count = len(snippets)
    yes = torch.randint(2, (count,), generator=order)
    first = torch.randint(_SNIPPET - _REVERSED, (count, 1), generator=order)
    place = torch.arange(_SNIPPET).expand(count, -1)
    inside = (place >= first) & (place < first + _REVERSED) & (yes[:, None] == 1)
    asked = snippets.gather(1, torch.where(inside, 2 * first + _REVERSED - 1 - place, place))
    return F.pad(asked, (0, 1), value=ord("?")), yes + ord("0")


_Ask = Callable[[Tensor, torch.Generator], tuple[Tensor, Tensor]]
#: Tasks by their names: what is asked, and a function that turns snippets of text into questions and answers.
TASKS: dict[str, tuple[str, _Ask]] = {
    "sums": ("the sum of three digits", _sums),
    "reversals": (f"whether {_REVERSED} bytes of {_SNIPPET} bytes of held-out text are in reverse order", _reversals),
}


def _pretrained(found: Text, device: torch.device) -> GPT:
    """A GPT that has learnt text, with the same seeds in every process; attention in plain operations has gradients without races."""
    how = GPTTraining(SIZE, SINGLE, _RATE, PRETRAINING, _BATCH, CONTEXT, 1.0, 0)
    with torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(how.seed)
        model = GPT(size(SIZE), VOCABULARY, CONTEXT).to(device)
        train_gpt(how, model, adamw(model, _RATE), found)
    return model
