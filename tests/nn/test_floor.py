"""Theorem 1 of *Training with Fewer Bits* on least squares: a bound on the mean squared gradient, and the floor that falls as 1/b."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import qsim
from qsim import Fixed

COPIES, SAMPLES, DIMENSIONS, STEPS, NOISE = 24, 256, 8, 200, 0.5
#: Formats of operands in the backward pass and of weights, which are coarse enough to matter.
OPERANDS, WEIGHTS = Fixed(6, 1), Fixed(12, 3)


class Found(NamedTuple):
    """The mean squared gradient of the true loss over all steps, and the theorem's bound."""

    squares: float
    bound: float


def descend(batch: int, start: float, rounds_weights: bool) -> Found:
    """Descend in many copies; the operands of the weights' gradient are rounded stochastically, weights forward to nearest.

    The bound is 4 (L(w0) - Lmin) / (rate T) + (2 + 4 rate L) B² + 2 rate L (S + Q) / b, with B = L sqrt(d) D / 2, where S and Q, the
    variances of a sample's gradient and of its rounding, are the largest of all steps.
    """
    draw = torch.Generator().manual_seed(batch)
    x = torch.randn(SAMPLES, DIMENSIONS, generator=draw)
    y = x.sum(1) + NOISE * torch.randn(SAMPLES, generator=draw)
    smooth = float(x.square().sum(1).max())
    rate, step = 1 / (4 * smooth), WEIGHTS.epsilon if rounds_weights else 0.0
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    weights = (best + start).expand(COPIES, -1).clone()

    def excess(at: torch.Tensor) -> float:
        return float((x @ (at - best)).square().mean() / 2)

    first, squares, sampling, rounding = excess(weights[0]), 0.0, 0.0, 0.0
    for number in range(STEPS):
        seen = qsim.quantize(weights, WEIGHTS) if rounds_weights else weights
        squares += float(((weights - best) @ x.T @ x / SAMPLES).square().sum(1).mean()) / STEPS
        each = (seen @ x.T - y)[..., None] * x
        sampling = max(sampling, float((each - each.mean(1, keepdim=True)).square().sum(2).mean()))
        chosen = torch.randint(SAMPLES, (COPIES, batch), generator=draw)
        inputs, errors = x[chosen], ((x[chosen] @ seen[:, :, None]).squeeze(2) - y[chosen])[..., None]
        a, g = (
            qsim.quantize(part, OPERANDS, rounding="stochastic", seed=2 * number + place) for place, part in enumerate((inputs, errors))
        )
        rounding = max(rounding, float((a * g - inputs * errors).square().sum(2).mean()))
        weights -= rate * (a * g).mean(1)
    bias = smooth * DIMENSIONS**0.5 * step / 2
    bound = 4 * first / (rate * STEPS) + (2 + 4 * rate * smooth) * bias**2 + 2 * rate * smooth * (sampling + rounding) / batch
    return Found(squares, bound)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("start", [0.0, 2.0])
@pytest.mark.parametrize("rounds_weights", [False, True])
def test_theorem_1(start: float, rounds_weights: bool) -> None:
    for batch in (2, 32):
        found = descend(batch, start, rounds_weights)
        assert found.squares <= found.bound


def test_the_floor_falls_with_the_batch() -> None:
    """From the optimum, the squared gradient is the floor: 16 times as low with a batch 16 times as large, unless weights round."""
    ratio, rounded = (descend(2, 0.0, way).squares / descend(32, 0.0, way).squares for way in (False, True))
    assert 14 < ratio < 18
    assert rounded < ratio / 8
