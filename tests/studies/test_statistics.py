"""Intervals of studies: within bounds, and effects that are found as often as promised."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qsim.studies.statistics import Interval, above, below, exponential, mean, positive, proportion, within


@pytest.mark.parametrize(
    "values", [[0.99, 1.0, 0.7], [0.001, 0.0, 0.02], [0.5, 0.5, 0.5], [0.1, 0.1], [0.7119140625] * 5, [1.0, 1.0], [0.3]]
)
def test_intervals_of_shares_are_shares(values: list[float]) -> None:
    found = proportion(values)
    assert found.value == pytest.approx(np.mean(values))
    assert 0 <= found.low <= found.value <= found.high <= 1


@pytest.mark.parametrize("values", [[0.004, 0.0001, 0.009], [3.0, 3.0], [5.0]])
def test_intervals_of_positive_numbers_are_positive(values: list[float]) -> None:
    found = positive(values)
    assert 0 <= found.low <= found.value <= found.high


def test_near_the_middle_bounds_make_no_difference() -> None:
    values = [0.5, 0.501, 0.499, 0.5005]
    for bounded in (proportion(values), positive(values)):
        assert bounded.low == pytest.approx(mean(values).low, abs=1e-5)
        assert bounded.high == pytest.approx(mean(values).high, abs=1e-5)


@pytest.mark.parametrize("count", [3, 6, 12])
def test_effects_that_an_interval_detects_are_found_four_times_in_five(count: int) -> None:
    spread = np.tile([-1.0, 0.0, 1.0], count // 3)
    spread /= spread.std(ddof=1)
    effect = mean(spread.tolist()).detects
    draws = np.random.default_rng(0).normal(effect, 1.0, size=(4000, count))
    found = np.mean([mean(row.tolist()).low > 0 for row in draws])
    # Student's quantiles are an approximation, which is worst for three values. Over 4000 draws a share of 0.8 deviates by 0.006.
    assert 0.73 < found < 0.83


def test_one_seed_detects_nothing() -> None:
    assert mean([1.0]).detects == math.inf
    assert exponential(mean([1.0])).high == math.inf


def test_factors_detect_factors() -> None:
    found = mean([0.0, 0.1, 0.2])
    assert exponential(found).detects == pytest.approx(math.exp(found.detects))


def test_decisions_are_none_where_the_interval_contains_the_bound() -> None:
    low, high, across = Interval(1.0, 0.9, 1.1), Interval(3.0, 2.9, 3.1), Interval(2.0, 1.0, 3.0)
    assert [above(each, 2.0) for each in (low, high, across)] == [False, True, None]
    assert [below(each, 2.0) for each in (low, high, across)] == [True, False, None]
    assert [within(each, 0.5, 2.0) for each in (low, high, across)] == [True, False, None]
