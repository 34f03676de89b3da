"""StochasticScales: each scale is one of two values with the probability that makes it exact on average."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import qsim
from qsim import Quantizer
from qsim.points import StochasticScales
from qsim.scaling import Block, PerTensor
from support.refusing import refused

#: The chance that one of all comparisons in this file fails although nothing is wrong is below 1e-6.
_SIGMAS = 7.0


def test_scales_are_the_neighbours_of_exact_ones_with_their_mean() -> None:
    """Elements are multiples of a / 6, so that what is returned shows the scale of the block."""
    blocks = torch.tensor([1.0, 1.03, 5.9, 0.013, 2.0])[:, None].double()
    x = blocks * torch.tensor([6.0, -3.0, 0.5, 1.5] * 4)
    point, count = StochasticScales(Block("e2m1", 16, scale="e4m3", rule="fit")), 2000
    drawn = point(x.expand(count, *x.shape), seed=1)
    scales = drawn[:, :, 0] / 6
    assert torch.equal(drawn, scales[:, :, None] * (x / blocks))
    for found, exact in zip(scales.unbind(1), blocks.flatten().tolist(), strict=True):
        below, above = (qsim.quantize(torch.tensor([exact], dtype=torch.float64), "e4m3", way).item() for way in ("down", "up"))
        assert set(found.tolist()) <= {below, above}
        share = 0.0 if above == below else (exact - below) / (above - below)
        expected = (found == above).double().mean().item() if above > below else 0.0
        assert abs(expected - share) <= _SIGMAS * math.sqrt(share * (1 - share) / count)


@pytest.mark.parametrize(
    "point", ["nvfp4", Block("e2m1", (4, 4), scale="e8m0", rule="fit"), Block("e2m1", 8, "e5m2", "fit", "tensor")], ids=str
)
def test_the_mean_is_the_tensor(point: Any) -> None:
    """With stochastic elements: the noise of scales and that of elements are independent."""
    torch.manual_seed(0)
    x, count = torch.randn(4, 32, dtype=torch.float64), 2000
    stochastic = StochasticScales(Quantizer(point, "stochastic"))
    draws = stochastic(x.expand(count, *x.shape), seed=qsim.random.Noise(1, stream=3))
    deviation = draws.std(0).clamp(min=1e-9) / math.sqrt(count)
    # The scale of the tensor is rounded to float32, so that the largest block's exceeds 448 by a hair.
    assert ((draws.mean(0) - x).abs() <= _SIGMAS * deviation + 1e-6).all()


def test_seeds_generators_and_special_numbers() -> None:
    x, point = torch.randn(4, 32), StochasticScales("nvfp4")
    assert torch.equal(point(x, seed=3), point(x, seed=3))
    assert not torch.equal(point(x, seed=3), point(x, seed=4))
    assert not torch.equal(point(x), point(x))
    assert torch.equal(point(torch.zeros(2, 32)), torch.zeros(2, 32))
    x[1, 5] = torch.inf
    assert point(x).isnan().sum() == 16
    assert torch.equal(point(x)[1, :16].isnan(), torch.ones(16, dtype=torch.bool))


def test_errors() -> None:
    with refused(ValueError, "StochasticScales: scales are drawn next to a / M, rule='fit' without a margin", "rule='floor'"):
        StochasticScales("mxfp4")
    with refused(ValueError, "StochasticScales: point needs scales that follow from its tensor, got scale=None"):
        StochasticScales("e4m3")
    with refused(ValueError, "StochasticScales: point needs scales that follow from its tensor, got scale=Delayed"):
        StochasticScales(Quantizer("e4m3", scale=qsim.scaling.Delayed(4)))
    assert StochasticScales(Quantizer("int8", scale=PerTensor("bf16"))).call is not None


def test_scales_and_elements_draw_different_bits() -> None:
    """Blocks of two: the first element shows the scale of its block, the second is rounded with the bits of its own index.

    Were these the bits of the scale of the same index, both would be raised together. Both chances are one half, so that the correlation
    of 2000 pairs deviates from zero by 1 / sqrt(2000).
    """
    point = StochasticScales(Quantizer(Block("e2m1", 2, scale="e4m3", rule="fit"), "stochastic"))
    x = torch.tensor([6 * 1.0625, 1.25 * 1.0625]).repeat(4000, 1)
    for seed in (5, qsim.random.Noise(5, stream=2)):
        drawn = point(x, seed=seed)
        scales = drawn[:, 0] / 6
        is_raised, elements = scales > 1.0625, drawn[:, 1] / scales
        assert set(elements.tolist()) == {1.0, 1.5}
        both = torch.stack([is_raised[1::2].double(), (elements[:2000] > 1.25).double()])
        assert abs(torch.corrcoef(both)[0, 1]) < _SIGMAS / math.sqrt(2000)
