"""Data and a model for it, by the names that the options `--data` and `--model` take: labelled images, text or questions for a GPT."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from qsim.studies.learners import gpt_training, tasks
from qsim.studies.learners.gpt import GPT, size
from qsim.studies.learners.images import RESIDUAL, described as described_images, images, variant as variant_of_images
from qsim.studies.learners.text import LIBRARY, VOCABULARY, LabelledBytes, text
from qsim.studies.learners.training import Examples

#: The model that suits the data, a residual net for images, a GPT for text, or one that is trained before and learns to answer questions.
OWN, GPT_TINY, PRETRAINED = "own", "gpt", "pretrained"
MODELS = (OWN, *RESIDUAL, GPT_TINY, PRETRAINED)
#: Bytes per sequence, and the largest numbers of sequences for training and for testing.
CONTEXT, _TRAINING, _TEST = 64, 4096, 512


def examples(data: str, model: str, device: torch.device) -> Examples:
    """The data with a model.

    Raises:
        ValueError: If the data does not exist or there is no such model.

    Example:
        >>> import torch
        >>> examples("digits", "resnet", torch.device("cpu")).test_x.shape
        torch.Size([899, 1, 8, 8])
    """
    if model not in MODELS:
        raise ValueError(f"model: must be one of {', '.join(MODELS)}; got {model!r}")
    if model == PRETRAINED:
        return tasks.questions(data, device)
    return _sequences(data, device) if model == GPT_TINY else replace(images(data, device), model=model)


def predictions(model: str) -> int:
    """The number of predictions per example, over which its loss is a mean."""
    return CONTEXT if model == GPT_TINY else 1


def unit(model: str) -> str:
    """The word for examples."""
    return "questions" if model == PRETRAINED else "sequences" if model == GPT_TINY else "images"


def optimizer(model: str, net: nn.Module, rate: float) -> torch.optim.Optimizer:
    """The optimizer at a constant learning rate: plain SGD, or Adam for a GPT, which learns no text by SGD in some hundred steps."""
    if model not in (GPT_TINY, PRETRAINED):
        return torch.optim.SGD(net.parameters(), lr=rate)
    return torch.optim.Adam(net.parameters(), lr=rate, betas=gpt_training.BETAS, capturable=next(net.parameters()).is_cuda)


def optimized(model: str) -> str:
    """The optimizer, for reports."""
    if model not in (GPT_TINY, PRETRAINED):
        return "Plain SGD"
    return f"Adam with betas of 0.9 and 0.95{', since the model learns nothing by plain SGD,' if model == GPT_TINY else ''}"


def described(data: str, model: str) -> str:
    """The data and the model, with its number of parameters.

    Example:
        >>> described("digits", "resnet").partition(" learns ")[0]
        'A WideResNet-10-1 with 77,562 parameters'
    """
    if model == PRETRAINED:
        return tasks.described(data)
    if model != GPT_TINY:
        return described_images(data, model)
    return f"{gpt_training.described(['tiny'], VOCABULARY, CONTEXT, data)}, in sequences of {CONTEXT}"


def variant(data: str, model: str) -> str:
    """The model and the data in a few words, for titles; empty for the digits and their perceptron.

    Example:
        >>> variant("library", "gpt"), variant("digits", "own")
        ("A GPT on Python's standard library", '')
    """
    if model == PRETRAINED:
        return f"Fine-tuning on {data}"
    if model != GPT_TINY:
        return variant_of_images(data, model)
    name = "Python's standard library" if data == LIBRARY else Path(data).name
    return f"A GPT on {name}"


class _NextByte(nn.Module):
    """The smallest GPT, whose logits have the class as second dimension, as `cross_entropy` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(size("tiny"), VOCABULARY, CONTEXT)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.gpt(x)).transpose(1, 2)


@lru_cache(maxsize=2)
def _sequences(data: str, device: torch.device) -> LabelledBytes:
    """Bytes, and the byte that follows each."""
    found = text(data, CONTEXT, device)
    counts = found.held_out // CONTEXT, (len(found.tokens) - found.held_out) // CONTEXT
    train = found.batch(min(_TRAINING, counts[0]), CONTEXT, torch.Generator().manual_seed(0)).long()
    test = found.validation(min(_TEST, counts[1]), CONTEXT).long()
    return LabelledBytes(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:], _NextByte)
