"""Residual nets: WideResNet-16-4 and ResNet-18, the nets of the papers' experiments on CIFAR-10, and a smaller one."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _ResidualBlock(nn.Module):
    """Two convolutions, each after normalization and ReLU, with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both branches."""
        seen = F.relu(self.norm1(x))
        beside = x if self.shortcut is None else self.shortcut(seen)
        return beside + cast(Tensor, self.conv2(F.relu(self.norm2(self.conv1(seen)))))


class WideResNet(nn.Module):
    """A residual net whose blocks normalize what they read (Zagoruyko and Komodakis, 2016), by default WideResNet-16-4.

    Args:
        classes: The number of classes.
        channels: The number of channels of an image.
        blocks: The number of blocks per group.
        widths: The channels behind the first convolution and behind each group of blocks, of which all but the first halve the image.
    """

    def __init__(self, classes: int, channels: int = 3, *, blocks: int = 2, widths: tuple[int, ...] = (16, 64, 128, 256)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        stack = []
        for group, (inputs, outputs) in enumerate(pairwise(widths)):
            stack += [
                _ResidualBlock(inputs, outputs, 1 if group == 0 else 2),
                *(_ResidualBlock(outputs, outputs, 1) for _ in range(blocks - 1)),
            ]
        self.blocks = nn.Sequential(*stack)
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        seen = F.relu(self.norm(self.blocks(self.stem(x))))
        return cast(Tensor, self.head(torch.mean(seen, (2, 3))))
