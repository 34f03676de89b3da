"""scikit-learn's digits, and a small net for them."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


def conv() -> nn.Module:
    """Two convolutions and a linear layer."""
    features = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(256, 10))


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels: one half to train on, and one to test on."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16, torch.tensor(labels)[order]
    half = len(y) // 2
    return x[:half], y[:half], x[half:], y[half:]
