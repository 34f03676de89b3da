"""The study `learning-rate`: its training runs, its correlations and its report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qsim import studies
from qsim.studies.learners.gpt_training import METHODS, MIXED, STOCHASTIC, GPTTraining, begin, train_gpt, validation_loss
from qsim.studies.learners.text import Text, text
from qsim.studies.learning_rate import TRAINING, LearningRateStudy, Run, Settings, frequencies_loss, toy, toy_correlations
from qsim.studies.learning_rate.correlations import Correlations
from qsim.studies.learning_rate.report import Written, _formula, _lowest
from qsim.studies.result import Result
from support.bounds import ERROR_PROBABILITY

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def findings(quick_study: Callable[..., studies.Plan]) -> Written:
    plan = quick_study("learning-rate", steps=20, context=16, lowest=2.0**-7)
    return Written(plan.study, plan.settings, list(plan.store.results().values()))


def test_correlations_of_the_toy_are_those_of_the_formula(findings: Written) -> None:
    # A product of what two steps do is at most w**2, w being D or, unrounded, 2; its mean square is at most w**2 times E g g' = 5/4. So
    # Bernstein bounds by how much its mean is off, and a correlation by that through a variance, whose own error counts as much again.
    log = math.log(4 / ERROR_PROBABILITY)
    for method in (MIXED, STOCHASTIC):
        for levels in findings.settings.levels:
            width, variance = levels if method == STOCHASTIC else 2.0, 0.25 / _formula(method, levels)
            count = findings.settings.weights
            off = 2 * (math.sqrt(2.5 * width**2 * log / count) + width**2 * log / (3 * count)) / variance
            assert off < 0.3
            assert abs(findings.toy(method, levels).value - _formula(method, levels)) < off
    assert _formula(MIXED, 4.0) == 0.5
    assert _formula(STOCHASTIC, 4.0) == pytest.approx(1 / 12)


def test_the_formula_is_what_enumeration_gives() -> None:
    """All values of X, of both Y and of both roundings, with their probabilities."""
    levels, outcomes = 8.0, []
    for lasting in (0, 1):
        for first in (0, 1):
            for second in (0, 1):
                p, q = (lasting + first) / levels, (lasting + second) / levels
                outcomes += [(levels * a, levels * b, (p if a else 1 - p) * (q if b else 1 - q) / 8) for a in (0, 1) for b in (0, 1)]
    one, two, weight = np.array(outcomes).T
    assert weight.sum() == pytest.approx(1)
    mean = (weight * one).sum()
    covariance, variance = (weight * one * two).sum() - mean**2, (weight * one**2).sum() - mean**2
    assert covariance / variance == pytest.approx(_formula(STOCHASTIC, levels))


def test_trainings_learn_and_claims_say_what_was_measured(findings: Written) -> None:
    for method in findings.settings.methods:
        for rate in findings.rates:
            (loss,) = findings.losses(method, rate)
            # After 20 steps: better than knowing nothing, worse than the final loss of models of this size. Four seeds gave 3.10 to 3.50.
            assert 2 < loss < math.log(256) - 1
    claims = {claim.source: claim for claim in findings.report().claims}
    assert claims["Proposition 1"].agrees is True
    # One seed decides nothing.
    assert claims["Table 2"].agrees is None


def report_on(losses: dict[str, list[float]], seeds: int = 3) -> Written:
    """A report on losses that are given by method and rate."""
    settings = Settings(lowest=2.0**-8, highest=2.0**-5, methods=tuple(losses), seeds=seeds)
    study = LearningRateStudy()
    values = {"frequencies": 3.3, "gradients": None, "updates": None}
    found = []
    for run in study.runs(settings):
        if run.experiment == TRAINING:
            loss = losses[run.method][settings.rates.index(run.rate)] + 0.001 * run.seed
            found.append(Result(run, values | {"loss": loss}, 1.0, {}))
        else:
            found.append(Result(run, {"correlations": [0.5, 0.51]}, 1.0, {}))
    return Written(study, settings, found)


def test_rates_are_stable_up_to_the_first_failure() -> None:
    findings = report_on({MIXED: [2.5, 2.4, math.inf, 2.6], STOCHASTIC: [2.6, 2.4, 2.3, 3.4]})
    assert findings.stable(MIXED) == 2.0**-7
    assert findings.stable(STOCHASTIC) == 2.0**-6
    verdicts = {claim.paper.split(" ")[0] + claim.source: claim.agrees for claim in findings.report().claims}
    assert verdicts["atTable 3, Section 5.1"] is True
    assert verdicts["theTable 3"] is True
    reverse = report_on({STOCHASTIC: [2.5, 2.4, math.inf, 2.6], MIXED: [2.6, 2.4, 2.3, 3.4]})
    verdicts = {claim.paper.split(" ")[0] + claim.source: claim.agrees for claim in reverse.report().claims}
    assert verdicts["atTable 3, Section 5.1"] is False
    assert verdicts["theTable 3"] is False
    assert math.isnan(report_on({MIXED: [3.4] * 4, STOCHASTIC: [3.4] * 4}).stable(MIXED))


def test_the_lowest_point_of_a_parabola() -> None:
    x = np.array([-3.0, -2.0, -1.0, 0.0])
    assert _lowest(x, (x + 1.7) ** 2) == pytest.approx(-1.7)
    assert _lowest(x, x) == -3.0
    assert _lowest(x, -x) == 0.0


def test_cosines_are_those_of_steps_in_a_row() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    model = torch.nn.ParameterList([weight])
    watch = Correlations(model, first=0)
    for gradient, update in (([1.0, 0.0], [1.0, 0.0]), ([1.0, 1.0], [1.0, 0.0]), ([0.0, 1.0], [0.0, 0.0])):
        weight.grad = torch.tensor(gradient)
        watch(0)
        with torch.no_grad():
            weight += torch.tensor(update)
    assert watch.means() == {"gradients": pytest.approx(math.sqrt(0.5)), "updates": pytest.approx(1.0)}
    assert Correlations(model, first=0).means() == {"gradients": None, "updates": None}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_and_begins_alike(method: str) -> None:
    words = text("library", 16, CPU)
    how = GPTTraining("tiny", method, 2.0**-7, 20, 4, 16, 1.0, seed=3)
    model, optimizer = begin(how, CPU)
    reference, _ = begin(replace(how, method=MIXED), CPU)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert own.dtype == (torch.float32 if method == MIXED else torch.bfloat16)
        assert torch.equal(own.float(), other)
    before = validation_loss(how, model, words, 16)
    train_gpt(how, model, optimizer, words)
    assert validation_loss(how, model, words, 16) < before - 1


def test_rates_rise_and_fall() -> None:
    how = GPTTraining("tiny", MIXED, 1.0, 100, 1, 8, 0.0, 0)
    rates = [how.rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10] == 1.0
    assert all(late <= early for early, late in itertools.pairwise(rates[10:]))
    assert how.rate_at(100) == pytest.approx(0.1)


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="method: must be one of mixed, stochastic, kahan, nearest; got 'fp8'"):
        begin(GPTTraining("tiny", "fp8", 0.1, 1, 1, 8, 0.0, 0), CPU)


def test_frequencies_are_those_of_the_text_to_learn_from() -> None:
    words = Text(torch.tensor([0, 0, 0, 1] * 25 + [0, 1], dtype=torch.uint8), 100)
    # Each of the 256 bytes is counted once more than it occurs.
    assert frequencies_loss(words) == pytest.approx(-0.5 * (math.log(76 / 356) + math.log(26 / 356)))


def test_a_nan_loss_is_infinite(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"ab" * 1000)
    how = GPTTraining("tiny", MIXED, 0.1, 1, 2, 8, 0.0, 0)
    model, _ = begin(how, CPU)
    torch.nn.init.constant_(model.norm.weight, math.nan)
    assert validation_loss(how, model, text(str(tmp_path), 8, CPU), 4) == math.inf


def test_the_toy_follows_from_its_seed() -> None:
    runs = [Run(**toy(Settings(weights=1 << 10), STOCHASTIC, 8.0), seed=seed) for seed in (0, 0, 1)]
    first, again, other = (toy_correlations(run, CPU) for run in runs)
    assert first == again
    assert first != other
