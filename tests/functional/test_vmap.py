"""vmap: every sample gets the same result as in a separate call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qsim
from support.calls import CALLS, noisy, points, seeded
from support.comparing import raw


@pytest.fixture
def x(device: torch.device) -> Tensor:
    """Four rows of three values."""
    return points(device)


@pytest.mark.parametrize("x_dim", [0, 1, -1])
def test_without_noise(x: Tensor, x_dim: int) -> None:
    for name in ("nearest", "nonfinite", "dtype", "decode"):
        batched = torch.vmap(CALLS[name], in_dims=x_dim)(x)
        assert torch.equal(raw(batched), raw(torch.stack([CALLS[name](part) for part in x.unbind(x_dim)])))


@pytest.mark.parametrize(("x_dim", "seed_dim"), [(0, 0), (1, 0), (-1, 0), (None, 0), (0, None), (1, None), (-1, None)])
def test_every_sample_gets_what_it_gets_alone(device: torch.device, x_dim: int | None, seed_dim: int | None) -> None:
    x = torch.linspace(-3, 3, 36, device=device).view(6, 6)
    seeds = torch.arange(6, device=device) - 3 if seed_dim == 0 else torch.tensor(17, device=device)
    batched = torch.vmap(seeded, in_dims=(x_dim, seed_dim))(x, seeds)
    xs = [x] * 6 if x_dim is None else x.unbind(x_dim)
    alone = [seeded(xs[i], int(seeds[i]) if seed_dim == 0 else 17) for i in range(6)]
    assert torch.equal(batched, torch.stack(alone))
    codes = torch.vmap(lambda x, s: qsim.encode(x, "e4m3", rounding="stochastic", seed=s), in_dims=(x_dim, seed_dim))(x, seeds)
    assert torch.equal(codes, torch.stack([qsim.encode(a, "e4m3") for a in alone]))


def test_seed_given_as_a_number(device: torch.device) -> None:
    x = torch.linspace(-3, 3, 36, device=device).view(4, 9)
    batched = torch.vmap(lambda row: seeded(row, 17))(x)
    assert torch.equal(batched, torch.stack([seeded(row, 17) for row in x]))


def test_nested(device: torch.device) -> None:
    x = torch.linspace(-3, 3, 60, device=device).view(3, 4, 5)
    seeds = torch.arange(12, device=device).view(3, 4)
    batched = torch.vmap(torch.vmap(seeded))(x, seeds)
    alone = [[seeded(x[i, j], int(seeds[i, j])) for j in range(4)] for i in range(3)]
    assert torch.equal(batched, torch.stack([torch.stack(row) for row in alone]))


def test_empty_batch(device: torch.device) -> None:
    x = torch.empty(0, 5, device=device)
    assert torch.vmap(lambda row: qsim.quantize(row, "e4m3"))(x).shape == (0, 5)
    assert torch.vmap(seeded)(x, torch.empty(0, dtype=torch.int64, device=device)).shape == (0, 5)


def test_drawn_seeds_follow_vmaps_own_rules(device: torch.device) -> None:
    x = torch.full((4, 64), 1.0625, device=device)
    different = torch.vmap(noisy, randomness="different")(x)
    shared = torch.vmap(noisy, randomness="same")(x)
    assert all(not torch.equal(different[i], different[j]) for i in range(4) for j in range(i))
    assert all(torch.equal(shared[i], shared[0]) for i in range(4))
    assert not torch.equal(shared[0], different[0])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(noisy)(x)


def test_gradients_of_each_sample(device: torch.device) -> None:
    x = torch.linspace(-3, 3, 36, device=device).view(4, 9)
    seeds = torch.arange(4, device=device)
    gradients = torch.vmap(torch.func.grad(lambda x, s: seeded(x, s).square().sum()))(x, seeds)
    assert torch.equal(gradients, torch.stack([2 * seeded(x[i], i) for i in range(4)]))
