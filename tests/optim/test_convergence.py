"""Proofs of *Stochastic Rounding for LLM Training* about updates, on quadratic losses: Lemmas 2 to 4, Theorems 1 to 3, Corollary 1.

Our source of the paper lacks its formulas; those here are derived, and the docstrings say from what.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import qsim
from support.bounds import bernstein

#: The distance between bfloat16's levels from 1 to 2, where all weights stay.
LEVEL = 2.0**-7
TARGET = 1.5


def test_lemma_2() -> None:
    """By Lemma 1 the squared norm of the perturbation is sum |u| (D - |u|) on average: below D |u|_1, which is at most sqrt(d) D |u|_2."""
    copies, dimensions = 256, 1024
    updates = torch.rand(dimensions, generator=torch.Generator().manual_seed(0)) * LEVEL / 4
    for sizes, least in ((updates, 0.7), (torch.full_like(updates, LEVEL / 64), 0.98)):
        weights = nn.Parameter(torch.full((copies, dimensions), TARGET, dtype=torch.bfloat16))
        weights.grad = sizes.bfloat16().expand(copies, -1).contiguous()
        exact = weights.grad[0].double()
        qsim.optim.SGD([weights], lr=1.0, seed=1).step()
        squares = (TARGET - weights.detach().double() - exact).square().sum(1)
        expected = float((exact * (LEVEL - exact)).sum())
        bound = math.sqrt(dimensions) * LEVEL * float(exact.norm())
        # Each square is below that of a level.
        assert abs(float(squares.mean()) - expected) <= dimensions * bernstein(LEVEL**4 / 4, LEVEL**2, copies * dimensions, 2)
        assert least * bound <= expected <= bound


def test_lemma_3() -> None:
    """On average, Adam's steps u = g / sqrt(e + v) go down up to a term in u²: per weight, for a gradient of mean G and |g| <= R - sqrt(e),

        E[G u] >= G² / (2 sqrt(e + w)) - 2 R E[u²],

    where v is the earlier average plus g², and w the same plus E[g²]: Lemma 5.1 of Défossez et al. The expectations are exact sums over two
    values of g, one of which is rare.
    """
    axis, e = torch.logspace(-6, -0.01, 25, 2, dtype=torch.float64), 1e-6
    rare, large, small = (each.flatten() for each in torch.meshgrid(axis, axis, axis, indexing="ij"))
    g, share = torch.stack((large, -small)), torch.stack((rare, 1 - rare))
    for earlier in (0.0, 1e-3, 1.0):
        bound = g.abs().amax(0) + e**0.5
        u = g / (e + earlier + g.square()).sqrt()
        mean, along = (share * g).sum(0), (share * g).sum(0) * (share * u).sum(0)
        down = mean.square() / (e + earlier + (share * g.square()).sum(0)).sqrt() / 2
        squares = 2 * bound * (share * u.square()).sum(0)
        assert torch.all(along >= down - squares)
        # The last term is needed: where a large gradient is rare, most steps go up.
        assert (along < 0).any()


def test_lemma_4() -> None:
    """Where b is the decaying sum of a, the sum of a / (e + b) over N steps is at most log(1 + b_N / e) - N log(decay).

    That of the roots is at most the root of N times this: Lemma 5.2 of Défossez et al. and Cauchy's inequality.
    """
    steps, decay, e, b = 4000, 0.95, 1e-6, torch.zeros(4, dtype=torch.float64)
    drawn = torch.rand(steps, generator=torch.Generator().manual_seed(0))
    a = torch.stack((torch.ones(steps), drawn, (drawn < 0.01).float(), torch.logspace(-6, 6, steps))).double()
    shares = []
    for each in a.T:
        b = decay * b + each
        shares.append(each / (e + b))
    bound = (b / e).log1p() - steps * math.log(decay)
    found = torch.stack(shares, 1)
    assert torch.all(found.sum(1) <= bound)
    assert torch.all(found.sqrt().sum(1) <= (steps * bound).sqrt())
    assert found[0].sum() > 0.9 * bound[0]  # constant terms come close


def test_theorem_2() -> None:
    """The mean squared gradient over N steps of Adam without momentum is at most

        2 R F / (a N) + (4 d R² / c + a d R L / c²) S + R L d D / c × sqrt(S),  S = log(1 + R² / (c² e)) / N - log(beta),  c² = 1 - beta,

    of which Défossez et al. have all but the last term, that of stochastic rounding: by Lemma 2, a step adds at most L/2 sqrt(d) D |a u|,
    and the sum of |u| is bounded by Lemma 4.
    """
    copies, dimensions, steps, beta, e, rate = 64, 8, 300, 0.99, 1e-4, 2.0**-9
    curvature = torch.linspace(0.25, 1, dimensions)
    draw = torch.Generator().manual_seed(5)
    weights = nn.Parameter(torch.full((copies, dimensions), 1.9375))
    optimizer = qsim.optim.SGD([weights], lr=1.0, format="bf16", update="stochastic", seed=6)
    average, squares, loss, largest = torch.zeros_like(weights), 0.0, float(curvature.sum()) / 2 * (1.9375 - TARGET) ** 2, 0.0
    for step in range(1, steps + 1):
        exact = curvature * (weights.detach() - TARGET)
        squares += float(exact.square().sum(1).mean()) / steps
        drawn = exact + 0.2 * (2 * torch.rand(exact.shape, generator=draw) - 1)
        largest = max(largest, float(drawn.abs().max()))
        average = beta * average + drawn.square()
        weights.grad = rate * math.sqrt((1 - beta**step) / (1 - beta)) * drawn / (e + average).sqrt()
        optimizer.step()
    assert 1 < float(weights.detach().min()) < float(weights.detach().max()) < 2  # where levels are equally far apart
    bound, c = largest + math.sqrt(e), math.sqrt(1 - beta)
    logs = math.log1p(bound**2 / (c**2 * e)) / steps - math.log(beta)
    adam = 2 * bound * loss / (rate * steps) + (4 * dimensions * bound**2 / c + rate * dimensions * bound / c**2) * logs
    rounding = bound * dimensions * LEVEL / c * math.sqrt(logs)
    assert 0.02 * (adam + rounding) < squares <= adam + rounding


def path(update: str, rate: float, steps: int, count: int) -> Tensor:
    """Weights that descend the loss (w - 1.5)² / 2, whose gradients bfloat16 represents exactly, from 1.734375."""
    weights = nn.Parameter(torch.full((count,), 1.734375, dtype=torch.bfloat16))
    optimizer = qsim.optim.SGD([weights], lr=rate, update=update, seed=2)
    for _ in range(steps):
        weights.grad = (weights.detach() - TARGET).contiguous()
        optimizer.step()
    return weights.detach().double()


def test_theorem_1() -> None:
    """On average, stochastic updates follow exact gradient descent, and nearest ones do not.

    The gradient is linear, so its expectation is the gradient at the mean: no step has an error on average.
    """
    rate, steps, count = 2.0**-6, 40, 1 << 17
    exact = TARGET + (1.734375 - TARGET) * (1 - rate) ** steps
    found = path("stochastic", rate, steps, count)
    # Each step adds a variance of at most rate × distance × level, and earlier ones shrink.
    variance = steps * rate * 0.25 * LEVEL
    off = bernstein(variance, 1.0, count, 1)
    assert abs(float(found.mean()) - exact) <= off
    nearest = float(path("nearest", rate, steps, 2).mean())
    assert nearest == 1.734375  # every update is below half a level
    assert abs(nearest - exact) > 20 * off


def test_theorem_3() -> None:
    """With a rate that decays, nearest updates end farther away the lower it is; stochastic ones do not depend on rounding on average."""
    ends = {rate: float(path("nearest", rate, round(8 / rate), 2).mean()) - TARGET for rate in (2.0**-2, 2.0**-4, 2.0**-5)}
    assert [*ends.values()] == sorted(ends.values())
    # Where half a level is the largest update that is lost.
    assert all(LEVEL / 2 / rate - LEVEL <= end <= LEVEL / 2 / rate for rate, end in ends.items()), ends


def excess(rate: float) -> float:
    """The mean squared distance from the optimum that stochastic rounding adds to Adam's, without momentum, under noisy gradients."""
    noise, distances = torch.Generator().manual_seed(3), [0.0, 0.0]
    exact, rounded = (nn.Parameter(torch.full((1 << 12,), TARGET, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    options = {"lr": rate, "betas": (0.0, 0.999), "eps": 1e-12}
    optimizers = (torch.optim.Adam([exact], **options), qsim.optim.Adam([rounded], **options, state="fp32", seed=4))  # type: ignore[arg-type]
    for step in range(160):
        drawn = torch.randn(1 << 12, generator=noise)
        for place, (weights, optimizer) in enumerate(zip((exact, rounded), optimizers, strict=True)):
            weights.grad = (weights.detach() - TARGET + drawn).to(weights.dtype)
            optimizer.step()
            if step >= 80:
                distances[place] += float((weights.detach().double() - TARGET).square().mean())
    return distances[1] / distances[0] - 1


def test_corollary_1() -> None:
    """With a higher learning rate, the error of stochastic rounding vanishes next to Adam's own.

    Near the optimum a step u has the variance of its noise, rate², and that of rounding, |u| (D - |u|): about D / rate of the former while
    steps are shorter than a level, and at most (D / rate)² / 4 of it beyond.
    """
    low, high = excess(2.0**-8), excess(2.0**-5)
    assert low > 0.5
    assert abs(high) < 0.1
