"""LUQ's gradients as its paper defines them, in float64 and shares no code with the library."""

from __future__ import annotations

import copy
import dataclasses
import math

import torch
from torch import nn

import qsim


def mean_of_luq(x: float, largest: float) -> tuple[float, float, float]:
    """The two results of rounding a gradient and the probability of the larger: sections 4.2 and 4.3 of arXiv 2112.10769."""
    alpha = largest / 2**6
    if abs(x) < alpha:
        return 0.0, math.copysign(alpha, x), abs(x) / alpha
    n = min(math.floor(math.log2(abs(x) / alpha)), 6)
    below, above = alpha * 2.0**n, alpha * 2.0 ** min(n + 1, 6)
    share = (abs(x) - below) / (above - below) if above > below else 0.0
    return math.copysign(below, x), math.copysign(above, x), share


def test_gradients_are_rounded_as_in_the_paper() -> None:
    """Each number is rounded 40,000 times. The share of the larger result is within six deviations: an error in 10^7 runs for each."""
    point, largest, count = qsim.recipes.luq().points.grad, 5.0, 40_000
    assert isinstance(point, qsim.Quantizer)
    torch.manual_seed(0)
    tried = [largest, 0.0, 0.01, -0.07, 0.078125, 0.1, -0.9, 1.3, -2.6, 4.9]
    results = point(torch.tensor(tried).repeat(count, 1), seed=3).double()
    for x, column in zip(tried, results.T, strict=True):
        below, above, share = mean_of_luq(x, largest)
        found = column.unique().tolist()
        assert all(min(abs(value - below), abs(value - above)) < 1e-6 for value in found), (x, found)
        reached = ((column - above).abs() < 1e-6).double().mean().item() if above != below else 0.0
        assert abs(reached - share) <= 6 * math.sqrt(share * (1 - share) / count) + 1e-9, x


def test_operands_are_integers_under_the_largest_magnitude() -> None:
    x = torch.tensor([[7.0, -3.5, 0.4, 2.5, -7.0]]) * 0.3
    points = qsim.recipes.luq().points
    for point in (points.act, points.weight):
        assert isinstance(point, qsim.Quantizer)
        torch.testing.assert_close(point(x), torch.tensor([[7.0, -4.0, 0.0, 2.0, -7.0]]) * 0.3)


def test_the_bias_is_that_of_inputs_under_one_scale_per_tensor() -> None:
    """Inputs with outliers, as in a transformer, become zero next to them; the gradient itself is rounded without bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 8, bias=False))
    batches = [torch.randn(16, 32) for _ in range(3)]
    for batch in batches:
        batch[0] *= 40  # one sample is far from the others

    def biases(operand: qsim.Quantizer | None) -> dict[str, float]:
        points = qsim.recipes.luq().points
        chosen = points if operand is None else dataclasses.replace(points, act=operand, weight=operand)
        found = qsim.diagnostics.gradient_error(
            qsim.convert(copy.deepcopy(model), chosen), lambda net, x: net(x).square().mean(), batches, 64, seed=0
        )
        return {row.point: row.bias.value / row.gradient.value for row in found if row.layer == "all weights" and row.point != "none"}

    per_tensor, per_row = biases(None), biases(qsim.Quantizer(qsim.Int(4, symmetric=True), scale=qsim.scaling.PerRow()))
    assert per_tensor["act"] > 0.1
    assert abs(per_tensor["grad"]) < 0.01
    assert per_row["act"] < 0.1 * per_tensor["act"]
    assert per_row["all"] < 0.3 * per_tensor["all"]
