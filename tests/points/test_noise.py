"""Additive noise: its distribution, its source and its gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from qsim.points import Noise
from support.comparing import same_bits


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_has_the_standard_deviation_and_the_shape_of_its_distribution(distribution: str) -> None:
    x = torch.randn(100_000)
    error = Noise(0.5, distribution)(x, generator=torch.Generator().manual_seed(1)) - x  # type: ignore[arg-type]
    # The standard errors of mean and standard deviation are below 0.0016 and 0.0012; five of them.
    assert abs(error.mean().item()) < 0.008
    assert abs(error.std().item() - 0.5) < 0.006
    kurtosis = (error / error.std()).pow(4).mean().item()
    assert abs(kurtosis - (3.0 if distribution == "normal" else 1.8)) < 0.15
    if distribution == "uniform":
        assert error.abs().max() <= 0.5 * math.sqrt(3) + 1e-5


@pytest.mark.parametrize(("relative_to", "unit"), [(None, 1.0), ("rms", 30**0.5), ("max", 10.0)])
def test_is_relative_to_the_tensor(relative_to: str | None, unit: float) -> None:
    x = torch.tensor([-10.0, 4.0, 2.0, 0.0])
    drawn = [
        Noise(std, relative_to=to)(x, generator=torch.Generator().manual_seed(3)) - x
        for std, to in ((0.1, relative_to), (0.1 * unit, None))
    ]
    torch.testing.assert_close(*drawn)


def test_draws_from_torchs_generator_or_the_one_that_is_given() -> None:
    x, point = torch.zeros(100), Noise(1.0)
    torch.manual_seed(5)
    first, second = point(x), point(x)
    torch.manual_seed(5)
    assert same_bits(point(x), first)
    assert not torch.equal(first, second)
    assert same_bits(point(x, generator=torch.Generator().manual_seed(5)), first)


def test_the_gradient_is_that_of_the_identity_and_evaluation_is_noisy_too() -> None:
    x, upstream = torch.randn(20, requires_grad=True), torch.randn(20)
    net = nn.Sequential(Noise(0.1, relative_to="rms")).eval()
    y = net(x)
    y.backward(upstream)
    assert not torch.equal(y, x)
    assert same_bits(x.grad, upstream)  # type: ignore[arg-type]


def test_noise_below_half_a_unit_of_bfloat16_is_not_lost_on_average() -> None:
    x = torch.full((200_000,), 1.0 + 2**-8, dtype=torch.float32).bfloat16().add(0)
    y = Noise(2.0**-8)(x, generator=torch.Generator().manual_seed(0))
    assert y.dtype == torch.bfloat16
    assert len(y.unique()) > 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Noise(-1.0), r"Noise: std must not be negative, got -1\.0"),
        (lambda: Noise(1.0, "cauchy"), "Noise: distribution must be 'normal' or 'uniform', got 'cauchy'"),
        (lambda: Noise(1.0, relative_to="mean"), "Noise: relative_to must be 'rms', 'max' or None, got 'mean'"),
        (lambda: Noise(1.0)(torch.ones(2), seed=3), "Noise: it draws from a generator; give generator= instead of seed="),
    ],
)
def test_errors_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()  # type: ignore[operator]
