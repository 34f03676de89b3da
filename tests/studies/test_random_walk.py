"""The study `random-walk`: mean numbers of steps compared with the closed form, and the closed form with others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from qsim import studies
from qsim.studies.random_walk import EXACT, STOCHASTIC, RandomWalkStudy, Run, schedule_of
from qsim.studies.random_walk.report import Written
from qsim.studies.random_walk.walks import CONSTANT, HALVED, HARMONIC, LINEAR, UpdateSchedule, exact_steps, late, step_moments
from support.bounds import ERROR_PROBABILITY, bernstein

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def findings(quick_study: Callable[..., studies.Plan]) -> Written:
    plan = quick_study("random-walk")
    return Written(plan.study, plan.settings, list(plan.store.results().values()))


def test_means_are_those_of_the_closed_form(findings: Written) -> None:
    ways = findings.next_level + findings.stochastic
    assert len(ways) == 7
    for way in ways:
        mean, variance = step_moments(way.late)
        count = way.run.weights * len(way.results)
        assert abs(way.measured.value - mean) <= bernstein(variance, way.run.steps, count, len(ways)), way.label
    for way in findings.exact:
        assert way.measured.value == way.exact


def test_decay_makes_walks_late_and_a_higher_floor_compensates(findings: Written) -> None:
    slow, fast = (way.measured.value for way in findings.stochastic)
    exact = findings.exact[0].measured.value
    # The values of the closed form, which the test above compares with measured ones.
    assert slow > 1.3 * exact
    assert fast < 1.1 * exact
    # Constants that were fitted to the paper's numbers confirm none of them.
    assert [claim.agrees for claim in findings.report().claims] == [True, True, True, None, None]


def walk(optimizer: str, update: float, levels: int, weights: int, steps: int, seed: int) -> Run:
    constant = {"updates": CONSTANT, "first": update, "floor": 0.0, "length": 0, "method": STOCHASTIC}
    return Run(optimizer=optimizer, **constant, levels=levels, weights=weights, steps=steps, seed=seed)


@pytest.mark.slow
def test_the_mean_of_a_million_weights_is_within_a_percent() -> None:
    count, steps = 1 << 20, 80
    found = RandomWalkStudy().measure(walk("sgd", 0.25, 1, count, steps, 7), CPU)
    assert bernstein(12.0, steps, count) < 0.04
    assert abs(found["mean"] - 4) < 0.04
    assert found["late"] < 1e-3


def test_the_closed_form_of_updates_that_stay_the_same() -> None:
    for p, levels in ((0.5, 1), (0.125, 1), (0.25, 3)):
        mean, variance = step_moments(late(UpdateSchedule(CONSTANT, p)(2000), levels))
        # Of k geometric waits: k / p and k (1 - p) / p**2.
        assert mean == pytest.approx(levels / p)
        assert variance == pytest.approx(levels * (1 - p) / p**2)
        assert exact_steps(UpdateSchedule(CONSTANT, p)(2000), levels) == levels / p


def test_the_closed_form_of_updates_that_decay() -> None:
    updates = UpdateSchedule(HALVED, 0.5, floor=2.0**-6)(6000)
    still = late(updates, 1)
    product = np.prod(1 - 0.5 ** np.arange(1, 7))
    assert still[6] == pytest.approx(product)
    assert step_moments(still)[0] == pytest.approx(still[:6].sum() + 64 * product)
    assert exact_steps(updates, 1) == 7
    assert exact_steps(UpdateSchedule(HALVED, 0.5)(16), 1) == 0, "halved for ever, the sum of updates stays below 1"
    harmonic = late(UpdateSchedule(HARMONIC, 0.5)(400), 1)
    # Each update is a multiple of 2**-16: off by 2**-17 at most.
    assert harmonic[400] == pytest.approx(math.comb(800, 400) / 4**400, abs=400 * 2.0**-17)
    assert harmonic[400] == pytest.approx(1 / math.sqrt(math.pi * 400), rel=0.2)


def test_the_closed_form_of_several_levels_by_enumeration() -> None:
    updates = UpdateSchedule(LINEAR, 0.75, floor=0.125, length=8)(7)
    still = late(updates, 3)
    for steps in range(8):
        total = 0.0
        for ups in np.ndindex(*[2] * steps):
            if sum(ups) < 3:
                total += float(np.prod([p if up else 1 - p for p, up in zip(updates, ups, strict=False)]))
        assert still[steps] == pytest.approx(total)


def test_weights_that_have_arrived_are_dropped_and_counted() -> None:
    # Updates of a whole distance: all arrive at once. Of half: a weight arrives at step t with probability 1 / 2**t.
    at_once = RandomWalkStudy().measure(walk("adam", 1.0, 5, 64, 20, 0), CPU)
    assert (at_once["mean"], at_once["variance"], at_once["late"]) == (5.0, 0.0, 0.0)
    curve = RandomWalkStudy().measure(walk("adam", 0.5, 1, 1 << 14, 40, 1), CPU)["curve"]
    for step, left, mean, low, high in curve[:6]:
        # Hoeffding's bound, over all weights observed.
        assert abs(left - 0.5**step) < math.sqrt(math.log(12 / ERROR_PROBABILITY) / (2 * (1 << 14)))
        assert mean == pytest.approx(left)
        assert (low, high) == (0, 1 if left > 0.05 else 0)


def test_exact_weights_take_the_steps_that_the_paper_reports() -> None:
    study = RandomWalkStudy()
    low, high = (run for run in study.runs(study.settings()) if run.method == EXACT)
    assert (low.floor, high.floor) == study.settings().minima
    assert exact_steps(schedule_of(low)(low.steps), low.levels) == pytest.approx(4600, abs=5)


def test_levels_that_are_not_equally_far_apart_raise_an_error() -> None:
    study = RandomWalkStudy()
    with pytest.raises(ValueError, match=r"levels: must be in \[1, 64\], where they are equally far apart; got 65"):
        study.runs(replace(study.settings(), levels=65))
