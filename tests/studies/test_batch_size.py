"""The study `batch-size`: when gradients underflow, when they do not, and which batch compensates for a bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

import qsim
from qsim import studies
from qsim.studies.batch_size import FULL, IN_RANGE, PLAIN, BatchSize, Run
from qsim.studies.result import Result
from support import made_up

pytest.importorskip("sklearn")

Found = tuple[studies.Report, list[Result[Run]]]
SETTINGS = BatchSize().quick()
COARSE, MOST = SETTINGS.formats[0], SETTINGS.batches[-1]


@pytest.fixture(scope="module")
def found(quick_study: Callable[..., studies.Plan]) -> Found:
    plan = quick_study("batch-size")
    return plan.report(), list(plan.store.results().values())


def of_seeds(found: Found, what: str, format: str, rounding: str, batch: int, scale: str, micro_batches: int = 1) -> list[float]:
    wanted = ("", format, rounding, batch, scale, micro_batches)
    values = [
        r[what] for r in found[1]
        if (r.run.like, r.run.format, r.run.rounding, r.run.batch, r.run.loss_scale, r.run.micro_batches) == wanted
    ]  # fmt: skip
    assert len(values) == SETTINGS.seeds
    return values


def test_gradients_of_a_mean_over_the_largest_batch_underflow_to_nearest(found: Found) -> None:
    """The gradient of a logit is less than 1 / batch: below half of the format's smallest number all of them become 0."""
    assert qsim.format(COARSE).smallest / 2 >= 1 / MOST
    for loss in of_seeds(found, "loss", COARSE, "nearest", MOST, PLAIN):
        # The output of an untrained net is as good as ten equal probabilities, except for its initial weights.
        assert abs(loss - math.log(10)) < 0.1
    # One in a hundred untrained nets reaches a quarter.
    assert max(of_seeds(found, "accuracy", COARSE, "nearest", MOST, PLAIN)) < 0.25
    # Stochastic rounding preserves the mean of lost gradients.
    assert min(of_seeds(found, "accuracy", COARSE, "stochastic", MOST, PLAIN)) > 0.7


def test_in_range_nothing_underflows(found: Found) -> None:
    for batch in SETTINGS.batches:
        full = of_seeds(found, "loss", FULL, "nearest", batch, PLAIN)
        for rounding in SETTINGS.roundings:
            losses = of_seeds(found, "loss", COARSE, rounding, batch, IN_RANGE)
            # Less than a tenth of the possible accuracy is missing.
            assert all(loss - own < 0.1 * (math.log(10) - own) for loss, own in zip(losses, full, strict=True))


def test_a_batch_summed_up_from_parts_learns_as_well(found: Found) -> None:
    parts = of_seeds(found, "accuracy", COARSE, "stochastic", MOST, PLAIN, SETTINGS.micro_batches)
    assert min(parts) > 0.7


@pytest.mark.parametrize("scale", [PLAIN, IN_RANGE])
def test_at_most_four_times_the_batch_compensates_for_a_bit(found: Found, scale: str) -> None:
    """And by no smaller one: fewer bits never make gradients vary less."""
    factors = [r for r in found[1] if r.run.like and r.run.loss_scale == scale]
    assert len(factors) == SETTINGS.seeds
    for factor in factors:
        assert 1 < factor["low"] <= factor["factor"] <= factor["high"] < 4


def as_in_the_paper(run: Run) -> dict[str, float]:
    large = run.batch == MOST
    if run.like:
        return {"factor": 1.5}
    nearest = {PLAIN: 0.1 if large else 0.7, IN_RANGE: 0.7}[run.loss_scale]
    return {"accuracy": nearest if run.rounding == "nearest" else 0.9 if large else 0.8, "squared_gradient": 1 / run.batch}


def the_other_way(run: Run) -> dict[str, float]:
    large = run.batch == MOST
    if run.like:
        return {"factor": 5.0}
    accuracy = 0.9 if run.rounding == "nearest" else 0.6 if run.micro_batches > 1 else 0.7
    return {"accuracy": accuracy if large else 0.8, "squared_gradient": float(run.batch)}


def undecided(run: Run) -> dict[str, float]:
    number = made_up.noise(BatchSize(), run)
    return {"factor": 4 * math.exp(number), "accuracy": 0.5 + number / 2, "squared_gradient": math.exp(number)}


@pytest.mark.parametrize(("values", "verdict"), [(as_in_the_paper, True), (the_other_way, False), (undecided, None)])
def test_verdicts_follow_from_results(values: Callable[[Run], dict[str, float]], verdict: bool | None) -> None:
    def with_seeds(run: Run) -> dict[str, float]:
        return {name: value * (1 + 0.001 * run.seed) for name, value in values(run).items()}

    assert made_up.verdicts(BatchSize(), replace(SETTINGS, seeds=4), with_seeds) == [verdict] * 7


def test_gradients_that_vary_less_with_fewer_bits_decide_nothing() -> None:
    """They were truncated."""
    found = made_up.verdicts(BatchSize(), SETTINGS, lambda run: as_in_the_paper(run) | {"factor": 0.5 + 0.01 * run.seed})
    assert found == [True] * 5 + [None, True]
