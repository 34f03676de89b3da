"""Numbers halfway between two values, whose stochastic rounding is a coin toss. Independent coins agree half of the time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qsim import FivePoint, Quantizer
from support.bounds import check_share

#: It rounds 1.25 to 1 or 1.5.
COIN = Quantizer("e2m1", "stochastic")
WEIGHT = FivePoint(weight=COIN, weight_bwd=None)
#: Tosses that are compared.
COUNT = 2048


def check_independent(*coins: Tensor) -> None:
    """Assert that no two of some tensors agree more or less often than independent coins do."""
    flips = [x.flatten() == x.max() for x in coins]
    for i, first in enumerate(flips):
        check_share(int(first.sum()), first.numel(), 0.5, tests=len(flips) ** 2)
        for second in flips[:i]:
            check_share(int((first == second).sum()), first.numel(), 0.5, tests=len(flips) ** 2)


def filled(layer: Any, value: float = 1.25) -> Any:
    """A layer whose weights are one number."""
    with torch.no_grad():
        layer.weight.fill_(value)
    return layer


def linear() -> Any:
    """A layer whose rounded weights are coins."""
    return filled(nn.Linear(64, 32, bias=False))
