"""The study `stagnation`: its descents compared with the theorems, and Theorem 1's constants separately."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import qsim
from qsim import studies
from qsim.studies.stagnation import StagnationStudy
from qsim.studies.stagnation.least_squares import (
    ALL,
    COMPUTE,
    EXACT,
    KAHAN,
    METHODS,
    NEAREST,
    ONE,
    STOCHASTIC,
    DescendingWeights,
    Descent,
    Problems,
    problems,
)
from qsim.studies.stagnation.report import Written
from support.made_up import but

#: The relative error of rounding to bfloat16: the paper's machine epsilon.
EPSILON = 2.0**-8


@pytest.fixture(scope="module")
def findings(quick_study: Callable[..., studies.Plan]) -> Written:
    plan = quick_study("stagnation")
    return Written(plan.study, plan.settings, list(plan.store.results().values()))


def test_nearest_stays_above_theorem_1_and_the_others_go_a_hundred_times_below(findings: Written) -> None:
    for rate in findings.settings.rates:
        nearest = findings.whole(NEAREST, rate)
        # The bound again, from its formula.
        bound = EPSILON * (1 - rate * nearest.lipschitz) / (rate * nearest.lipschitz + EPSILON) * nearest._smallest
        assert (bound <= nearest.start).all()
        assert (nearest.lowest >= bound).all()
        for method in METHODS:
            if method != NEAREST:
                assert (findings.whole(method, rate).final <= bound / 100).all(), method
    single = findings.single(NEAREST)
    assert (single.lowest >= single.printed).all()
    assert (single.printed > 0).all()


def test_for_a_single_weight_the_corrected_bound_holds_and_the_published_one_does_not(findings: Written) -> None:
    below = 0
    for rate in findings.settings.rates:
        curves = findings.lone(rate)
        assert (curves.lowest >= curves.holding).all()
        below += int((curves.lowest < curves.printed).sum())
    # Optima are uniform in [0, 100): half a distance between levels is certainly lost, and is larger relative to a number that is close
    # to the power of two below it. Some are not.
    assert below > 0


def test_where_the_proof_of_theorem_1_assumes_too_many_lost_updates() -> None:
    """The last level below 2 loses updates up to 2**-8, not up to 2**-8 times itself."""
    weight = torch.tensor([2 - 2.0**-7])
    for update, lost in ((0.99 * 2.0**-8, True), (1.01 * 2.0**-8, False)):
        assert update <= EPSILON * weight.item()
        assert torch.equal(qsim.quantize(weight - update, "bf16"), weight) == lost


def test_theorem_2_holds_in_the_mean(findings: Written) -> None:
    for curves in [findings.single(COMPUTE), *(findings.whole(COMPUTE, rate) for rate in findings.settings.rates)]:
        beside = curves.beside_theorem_2()
        assert beside.shape == curves.distances.shape
        assert (beside.mean(1) <= 1).all()
        # By its formula, at the first step, where nothing can underflow.
        exponent = curves._rate * curves.convexity * (1 - 4 * EPSILON * curves.lipschitz / curves.convexity) * curves.steps[0]
        assert beside[0] == pytest.approx((curves.distances[0] / curves.start) ** 2 / [math.exp(-x) for x in exponent])


def test_claims_are_those_of_the_theorems(findings: Written) -> None:
    verdicts = [(claim.source, claim.agrees) for claim in findings.claims()]
    assert [agrees for source, agrees in verdicts if source == "Theorem 1"] == [True, False]
    # Descents with one sample per step have hardly moved after one, where the interval of sixteen problems may include the bound.
    assert [agrees for source, agrees in verdicts if source == "Theorem 2"] in ([True], [None])
    beyond = [claim for claim in findings.claims() if "beyond where nearest rounding stops" in claim.paper]
    assert [claim.agrees for claim in beyond] == [True] * 4
    # After so few steps nearest rounding is about a magnitude above, not several; the other is within a thousandth.
    assert [agrees for source, agrees in verdicts if source == "Figure 2"][1] is True


def test_problems_can_be_fitted_perfectly_by_weights_of_the_format_unless_there_is_noise() -> None:
    exact = problems(4, 50, 3, 0.0, "bf16", 1)
    assert torch.equal(qsim.quantize(exact.optimum, "bf16"), exact.optimum)
    assert torch.allclose((exact.x @ exact.optimum[..., None]).squeeze(2), exact.y)
    noisy = problems(4, 5000, 3, 0.5, "bf16", 1)
    residuals = (noisy.x @ noisy.optimum[..., None]).squeeze(2) - noisy.y
    # The variance of 20000 normal numbers deviates by more than 7 standard deviations once in 10**11.
    assert residuals.var().item() == pytest.approx(0.25, rel=7 * math.sqrt(2 / 20000))


@pytest.mark.parametrize("gradient", [ALL, ONE])
def test_lipschitz_constants_bound_gradients(gradient: str) -> None:
    data = problems(3, 20, 4, 0.0, "bf16", 2)
    shift = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    each = data.x * (data.x @ shift[..., None])
    changes = each.mean(1).norm(dim=1) if gradient == ALL else each.norm(dim=2).amax(1)
    assert (changes <= data.lipschitz(gradient) * shift.norm(dim=1)).all()
    assert (data.convexity() <= data.lipschitz(gradient)).all()


@pytest.mark.parametrize("method", METHODS)
def test_one_step_is_what_the_paper_writes(method: str) -> None:
    data = problems(2, 30, 3, 0.0, "bf16", 3)
    weights = DescendingWeights(data, Descent(method, "bf16", ALL, 0.125, seed=0))
    loss = weights.step()
    assert torch.allclose(loss, data.y.square().mean(1) / 2)
    residuals = -data.y if method != COMPUTE else qsim.quantize(-data.y, "bf16")
    gradient = torch.einsum("psd,ps->pd", data.x, residuals) / 30
    if method == COMPUTE:
        gradient = qsim.quantize(gradient, "bf16")
    step = -0.125 * gradient
    near = qsim.quantize(step, "bf16")
    expected = {EXACT: step, COMPUTE: step, NEAREST: near, KAHAN: near}
    if method == STOCHASTIC:
        low, high = (qsim.quantize(step, "bf16", rounding=way) for way in ("down", "up"))
        assert ((weights.values == low) | (weights.values == high)).all()
    else:
        assert torch.allclose(weights.values, expected[method], rtol=1e-12 if method in (EXACT, COMPUTE) else 0.0)


def test_one_sample_a_step_goes_through_the_samples_at_random() -> None:
    drawn = problems(1, 6, 2, 0.0, "bf16", 4)
    # Labels that identify the sample.
    data = Problems(drawn.x * 0, torch.arange(6.0, dtype=torch.float64)[None], drawn.optimum)
    weights = DescendingWeights(data, Descent(EXACT, "bf16", ONE, 0.1, seed=0))
    seen = {round(math.sqrt(2 * weights.step().item())) for _ in range(200)}
    # One of six would remain unseen once in 10**15.
    assert seen == set(range(6))


def test_settings_ask_for_runs_of_their_own() -> None:
    study = StagnationStudy()
    runs = study.runs(study.settings())
    assert len(set(runs)) == len(runs)
    assert {run.method for run in runs} == set(METHODS)
    assert {run.gradient for run in runs} == {ALL, ONE}
    more = study.runs(replace(study.settings(), seeds=3))
    assert set(runs) < set(more)


def test_rates_beyond_the_theorems_are_refused() -> None:
    study = StagnationStudy()
    run = but(study.runs(study.quick())[0], rate=1.5)
    with pytest.raises(ValueError, match=r"rate: the theorems hold up to 1/L, here 0\.\d+ with the gradient of all; got 1.5"):
        study.measure(run, torch.device("cpu"))
