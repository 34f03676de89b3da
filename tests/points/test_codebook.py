"""Tables of values: exact nearest neighbours, NF4, and tables that learn."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import norm
from torch import Tensor, nn

import qsim
from qsim.points import NF4, Codebook
from qsim.scaling import PerAxis, PerBlock
from support.comparing import same_bits


def nearest(x: float, table: list[float]) -> float:
    """The nearest value of a table, in exact arithmetic; the smaller of two."""
    return min(sorted(table), key=lambda value: abs(Fraction(x) - Fraction(value)))


NUMBERS = st.integers(-(2**24), 2**24).map(lambda i: i / 2**10)


@given(st.lists(NUMBERS, min_size=1, max_size=9, unique=True), st.lists(NUMBERS))
def test_the_nearest_value_is_exact(table: list[float], others: list[float]) -> None:
    middles = [np.float32((Fraction(a) + Fraction(b)) / 2) for a in table for b in table]
    around = [float(np.nextafter(middle, np.float32(to))) for middle in middles for to in (-math.inf, math.inf)]
    numbers = [*map(float, middles), *around, *others]
    for dtype in (torch.float32, torch.float64):
        point = Codebook(torch.tensor(table))
        x = torch.tensor(numbers, dtype=dtype)
        assert point(x).tolist() == [nearest(number, point.table.tolist()) for number in x.tolist()]


def test_values_that_are_not_finite() -> None:
    y = Codebook([1.0, -2.0])(torch.tensor([math.inf, -math.inf, math.nan]))
    assert y[:2].tolist() == [1.0, -2.0]
    assert y[2].isnan()


def test_nf4_is_qloras_table() -> None:
    # Quantiles of the normal distribution: 7 levels below zero and 8 above it, up to the probability of bitsandbytes' code.
    most = 0.9677083
    positive = norm.ppf(np.linspace(most, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(most, 0.5, 8)[:-1])
    quantiles = np.sort([*positive, 0.0, *negative])
    np.testing.assert_allclose(NF4, quantiles / quantiles.max(), atol=1e-6)


def test_scales_bring_each_groups_largest_magnitude_to_the_tables() -> None:
    x = torch.randn(3, 10) * torch.tensor([[1.0], [50.0], [0.001]])
    table = [-2.0, -1.0, 0.0, 0.5, 1.5]
    point = Codebook(table, PerBlock(4))
    for row, rounded in zip(x, point(x), strict=True):
        for part, values in zip(row.split(4), rounded.split(4), strict=True):
            scale = part.abs().max() / 2
            due = torch.tensor([nearest(number, table) for number in (part / scale).tolist()]) * scale
            assert same_bits(values, due)
    assert torch.equal(Codebook(table, PerAxis(0))(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_the_gradient_is_straight_through_and_that_of_a_table_is_summed() -> None:
    x, upstream = torch.randn(200, dtype=torch.float64, requires_grad=True), torch.randn(200, dtype=torch.float64)
    point = Codebook(torch.tensor([1.0, -1.0, 0.1, -0.2], dtype=torch.float64), learned=True)
    y = point(x)
    y.backward(upstream)
    assert same_bits(x.grad, upstream)  # type: ignore[arg-type]
    due = torch.stack([upstream[y == value].sum() for value in point.table])
    torch.testing.assert_close(point.table.grad, due)


def test_a_scaled_tables_gradient_is_that_of_finite_differences() -> None:
    x, upstream = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    table = torch.tensor([-1.0, -0.31, 0.12, 0.8], dtype=torch.float64)
    point = Codebook(table, PerAxis(0), learned=True)
    point(x).backward(upstream)
    # The levels inside change neither scales nor, by so little, which is nearest.
    for i in (1, 2, 3):
        up, down = (table.clone().index_add_(0, torch.tensor([i]), torch.tensor([step], dtype=torch.float64)) for step in (1e-6, -1e-6))
        change = (Codebook(up, PerAxis(0))(x) - Codebook(down, PerAxis(0))(x)) / 2e-6
        assert point.table.grad is not None
        torch.testing.assert_close(point.table.grad[i], (change * upstream).sum(), rtol=1e-6, atol=1e-6)


def error(point: nn.Module, x: Tensor) -> Tensor:
    return (point(x) - x).square().mean()


def test_a_learned_table_finds_the_levels_of_the_data() -> None:
    levels = torch.tensor([-3.0, -0.5, 0.25, 2.0])
    x = levels[torch.randint(4, (2000,))] + 0.01 * torch.randn(2000)
    point = Codebook([-1.0, 0.0, 0.5, 1.0], learned=True)
    optimizer = torch.optim.Adam(point.parameters(), 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        error(point, x).backward()
        optimizer.step()
    torch.testing.assert_close(point.table.detach().sort().values, levels, atol=0.02, rtol=0)
    assert error(point, x) < 2e-4


def test_the_order_of_a_table_does_not_matter() -> None:
    x = torch.randn(100)
    assert same_bits(Codebook([3.0, -1.0, 0.5])(x), Codebook([-1.0, 0.5, 3.0])(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Codebook([]), r"Codebook: table must be a list of finite numbers, got \[\]"),
        (lambda: Codebook([1.0, math.nan]), "Codebook: table must be a list of finite numbers"),
        (lambda: Codebook(torch.ones(2, 2)), "Codebook: table must be a list of finite numbers"),
        (lambda: Codebook([0.0], PerBlock(4)), "Codebook: a table of zeros cannot have scales"),
        (
            lambda: Codebook([1.0], 64),
            "Codebook: granularity must be PerTensor, PerRow, PerAxis, PerBlock or PerTile of qsim.scaling, got 64",
        ),
        (lambda: Codebook([1.0], qsim.scaling.PerTensor("e4m3")), "Codebook: granularity only describes which elements form a group"),
    ],
)
def test_errors_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()  # type: ignore[operator]
