"""Small updates are lost with round-to-nearest and kept by Kahan summation and stochastic rounding; Lemma 1: the noise of the latter.

Lemma 1 of *Stochastic Rounding for LLM Training*, derived: a step `w - lr * g` that is rounded stochastically is the exact step with
another gradient, `g + x`. Let `D` be the distance of the two levels around the result, as a difference of gradients (divided by `lr`), and
`p` the share of the way from the one that the step leaves to the other. Then `x` is `D * (1 - p)` with probability `p` and else `-D * p`,
up to its sign: its mean is 0, its variance `D**2 * p * (1 - p)`. If `w` is a level and the step is shorter than a distance, `p = |g| / D`
and the variance is `|g| * (D - |g|)`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from support.bounds import ERROR_PROBABILITY, check_share

UPDATE = 2.0**-12
#: Formats of weights, their dtypes, and the distance between their levels below 1.
WEIGHTS = [("bf16", torch.bfloat16, 2.0**-8), ("e4m3", torch.bfloat16, 2.0**-4), ("e4m3", torch.float32, 2.0**-4)]


def after(steps: int, count: int, weight: str, dtype: torch.dtype, update: str, sign: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights of 1 after steps that subtract 2**-12 from each, and their states, in float64."""
    w = nn.Parameter(torch.ones(count, dtype=dtype))
    optimizer = qsim.optim.SGD([w], lr=UPDATE, format=weight, update=update, seed=1)
    for _ in range(steps):
        w.grad = torch.full_like(w, sign)
        optimizer.step()
    return w.detach().double(), {name: state.double() for name, state in optimizer.state[w].items()}


@pytest.mark.parametrize(("weight", "dtype", "distance"), WEIGHTS)
def test_to_nearest_nothing_ever_moves(weight: str, dtype: torch.dtype, distance: float) -> None:
    assert (after(200, 8, weight, dtype, "nearest")[0] == 1).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("weight", "dtype", "distance"), WEIGHTS)
def test_kahan_follows_the_exact_path(weight: str, dtype: torch.dtype, distance: float, sign: float) -> None:
    # Up to half a distance, which above 1 is twice as large, the compensation is a multiple of 2**-12 with at most 8 bits: the
    # parameters' dtype holds it, though E4M3 itself would not. So nothing is lost, and the weight is the level nearest to the exact path.
    for steps in (1, 7, 8, 100, 300):
        w, states = after(steps, 4, weight, dtype, "kahan", sign)
        exact = 1 - sign * steps * UPDATE
        assert (w - states["compensation"] == exact).all()
        assert ((w - exact).abs() <= distance * (0.5 if sign > 0 else 1.0)).all()
    assert (w != 1).all()


@pytest.mark.parametrize(("weight", "dtype", "distance"), WEIGHTS)
def test_kahan_takes_off_the_noise_of_stochastic_rounding(weight: str, dtype: torch.dtype, distance: float) -> None:
    # The compensation is a multiple of 2**-12 of less than a distance, which the parameters' dtype holds.
    for steps in (7, 60, 100):
        w, states = after(steps, 1024, weight, dtype, "Kahan('stochastic')")
        exact = 1 - steps * UPDATE
        assert (w - states["compensation"] == exact).all()
        assert ((w - exact).abs() < distance).all()
        assert len(w.unique()) == 2  # both neighbours


@pytest.mark.parametrize(("weight", "dtype", "distance"), WEIGHTS)
def test_the_mean_of_stochastic_rounding_follows_the_exact_path(weight: str, dtype: torch.dtype, distance: float) -> None:
    # Each step moves by a whole distance, with the probability of an update's share of it, wherever it starts: so the weights together
    # moved by a binomial number of distances.
    count, steps = 1 << 14, 64
    w = after(steps, count, weight, dtype, "stochastic")[0]
    check_share(int(((1 - w) / distance).sum()), count * steps, UPDATE / distance)
    exact = 1 - steps * UPDATE
    assert abs(w.mean().item() - exact) < (1 - exact) / 4, "the mean is nearer to the path than to where it started"


@pytest.mark.parametrize(("weight", "dtype", "distance"), WEIGHTS)
@pytest.mark.parametrize("make", [qsim.optim.Adam, qsim.optim.AdamW])
def test_adam(make: Any, weight: str, dtype: torch.dtype, distance: float) -> None:
    moved, lr, steps = {}, distance / 16, 100
    for update in ("nearest", "kahan", "stochastic"):
        w = nn.Parameter(torch.ones(1 << 10, dtype=dtype))
        optimizer = make([w], lr=lr, weight_decay=0.0, eps=0.0, format=weight, state="fp32", update=update, seed=1)
        for _ in range(steps):
            w.grad = torch.ones_like(w)
            optimizer.step()
        moved[update] = (1 - w.detach().double()).mean().item()
    # Constant gradients make updates equal to the learning rate, except for float32's roundings: 2**-24 in about ten operations.
    exact, off = steps * lr, steps * lr * 2**-20
    assert moved["nearest"] == 0
    # The compensation is below one distance, and bfloat16 is off by 2**-9 of it at each step.
    assert abs(moved["kahan"] - exact) <= distance / 2 + steps * distance * 2**-9 + off
    assert abs(moved["stochastic"] - exact) <= hoeffding(1 << 10, distance * math.sqrt(steps)) + off


def hoeffding(count: int, width: float, tests: int = 1) -> float:
    """Hoeffding's bound for a mean of independent numbers, each in a range of this width, or for a sum of such steps."""
    return width * math.sqrt(math.log(2 * tests / ERROR_PROBABILITY) / (2 * count))


COUNT = 1 << 18


@pytest.mark.parametrize("gradient", [1.0, 0.25, -3.5, 13.0, -0.0625])
def test_lemma_1(gradient: float) -> None:
    lr = 2.0**-12
    w = nn.Parameter(torch.full((COUNT,), 1.5, dtype=torch.bfloat16))
    levels = 2.0**-7 / lr
    optimizer = qsim.optim.SGD([w], lr=lr, seed=3)
    w.grad = torch.full_like(w, gradient)
    optimizer.step()
    perturbation = (1.5 - w.detach().double()) / lr - gradient
    p = abs(gradient) / levels
    variance = abs(gradient) * (levels - abs(gradient))
    assert set(perturbation.abs().tolist()) == {levels * p, levels * (1 - p)}
    check_share(int((w != 1.5).sum()), COUNT, p)
    assert abs(perturbation.mean().item()) <= hoeffding(COUNT, levels)
    assert abs(perturbation.square().mean().item() - variance) <= hoeffding(COUNT, levels**2)


def test_lemma_1_of_adam_and_of_further_steps() -> None:
    """The step before rounding is that of the same optimizer in float32, whichever it is; each step draws new noise."""
    generator = torch.Generator().manual_seed(5)
    kinds, count = 16, 1 << 15
    options = {"lr": 1e-2, "state": "fp32", "seed": 3}
    w = nn.Parameter(torch.linspace(-2, 2, kinds).bfloat16().repeat_interleave(count).view(kinds, count))
    optimizer = qsim.optim.AdamW([w], **options)
    found = []
    for _ in range(2):
        # Another optimizer takes the same step in float32, from the same weights and moments.
        single = nn.Parameter(w.detach().float())
        other = qsim.optim.AdamW([single], format="fp32", update="nearest", **options)
        other.load_state_dict({**other.state_dict(), "state": optimizer.state_dict()["state"]})
        w.grad = torch.randn(kinds, 1, generator=generator).expand(kinds, count).bfloat16()
        single.grad = w.grad.float()
        other.step()
        optimizer.step()
        exact = single.detach().double()
        low, high = (qsim.quantize(single.detach(), "bf16", rounding=way).double() for way in ("down", "up"))
        assert ((w == low) | (w == high)).all()
        perturbation, distances = w.detach().double() - exact, (high - low).amax(1)
        # Each row of weights is a separate test: after the first step they start from different values, but the expectation is an average.
        assert (distances > 0).all()
        assert (perturbation.mean(1).abs() <= distances * hoeffding(count, 1.0, kinds)).all()
        off = (perturbation.square() - (exact - low) * (high - exact)).mean(1).abs()
        assert (off <= distances**2 * hoeffding(count, 1.0, kinds)).all()
        found.append((perturbation, distances))
    # The effects of two steps on a weight are independent.
    together, width = (first * second for first, second in zip(*found, strict=True))
    assert (together.mean(1).abs() <= width * hoeffding(count, 2.0, kinds)).all()
