"""The models whose training is measured: a GPT and a small convolutional net, both in plain torch.

They return the sum of the losses of a batch. Gradients of the mean of 16 thousand are so small that FP8 without scales rounds them to zero,
and kernels are faster with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsim.studies.learners.gpt import GPT, GPTSize


@dataclass(frozen=True)
class GPTBenchSize:
    """The size of a GPT and of its batches."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    context: int
    batch: int


@dataclass(frozen=True)
class ConvBenchSize:
    """The size of a convolutional net and of its batches."""

    width: int
    blocks: int
    classes: int
    image: int
    batch: int


#: The last layer of both, which has no points.
LAST = "head"
SIZES = {
    "medium": (GPTBenchSize(24, 16, 1024, 50304, 1024, 16), ConvBenchSize(64, 3, 10, 32, 512)),
    "small": (GPTBenchSize(12, 12, 768, 50304, 1024, 16), ConvBenchSize(64, 3, 10, 32, 512)),
    "tiny": (GPTBenchSize(2, 2, 64, 256, 64, 4), ConvBenchSize(8, 1, 10, 16, 16)),
}


class LanguageModel(GPT):
    """A GPT that returns its loss, in the dtype in which it computes."""

    def __init__(self, size: GPTBenchSize) -> None:
        super().__init__(GPTSize(size.layers, size.width, size.heads), size.vocabulary, size.context)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """The summed loss of the next tokens."""
        return F.cross_entropy(super().forward(x).flatten(0, 1), target.flatten(), reduction="sum")


class ConvNet(nn.Module):
    """A residual net for small images."""

    def __init__(self, size: ConvBenchSize) -> None:
        super().__init__()
        widths = [size.width << stage for stage in range(3)]
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        stages = []
        for stage, width in enumerate(widths):
            if stage:
                stages.append(nn.Sequential(nn.Conv2d(width // 2, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()))
            stages += [_Residual(width) for _ in range(size.blocks)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], size.classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The summed loss."""
        return F.cross_entropy(self.head(self.stages(self.stem(x)).mean((2, 3))), target, reduction="sum")


class _Residual(nn.Sequential):
    def __init__(self, width: int) -> None:
        def convolution() -> list[nn.Module]:
            return [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]

        super().__init__(*convolution(), nn.ReLU(), *convolution())

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input + cast(Tensor, super().forward(input)))  # type: ignore[no-untyped-call]


class Subject(NamedTuple):
    """The model whose training is measured.

    Attributes:
        name: `"gpt"` or `"conv"`.
        size: One of `SIZES`.
        layers: The number of a GPT's layers, if not that of its size.
    """

    name: str
    size: str
    layers: int | None = None

    def make(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, Tensor], int]:
        """The model, a batch for it, and the number of tokens or images in the batch."""
        gpt, conv = SIZES[self.size]
        torch.manual_seed(0)
        if self.name == "gpt":
            gpt = replace(gpt, layers=self.layers or gpt.layers)
            x = torch.randint(gpt.vocabulary, (gpt.batch, gpt.context + 1), device=device)
            return LanguageModel(gpt).to(device, dtype), (x[:, :-1], x[:, 1:]), gpt.batch * gpt.context
        images = torch.randn(conv.batch, 3, conv.image, conv.image, device=device, dtype=dtype)
        return ConvNet(conv).to(device, dtype), (images, torch.randint(conv.classes, (conv.batch,), device=device)), conv.batch
