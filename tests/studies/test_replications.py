"""The study `replications`: its measurements against known answers, and every verdict from made-up results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from qsim import studies
from qsim.studies.replications import (
    ALL,
    DESCENT,
    FULL,
    PRODUCTS,
    RING,
    ROLLOUT,
    STUDENT,
    SUMS,
    ReplicationsStudy,
    Run,
    Settings,
    measurements,
)
from qsim.studies.replications.report import Written

CPU = torch.device("cpu")
SETTINGS = Settings(seeds=4)


def test_a_ring_rounds_at_every_hop() -> None:
    found = measurements.ring((4, 64), 0, CPU)
    # Half of BF16's relative error is uniform up to 2^-8; one rounding has about 2^-8 / sqrt(3) / 1.4 of it.
    assert all(0.001 < error < 0.003 for error in found["one_shot"])
    assert found["ring"][1] > 2.5 * found["ring"][0] > 2.5 * found["one_shot"][0]


def test_narrow_sums_lose_their_variance() -> None:
    found = measurements.narrow_sums(1, 0, CPU)
    assert found["lengths"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert found["shares"][-1] < 0.6 < 0.9 < found["shares"][0]
    assert 4 < found["length"] < 64


@pytest.mark.parametrize(("shares", "expected"), [([1.0, 0.95, 0.85, 0.5], 2 * 2**0.5), ([1.0, 0.95, 0.92, 0.91], math.inf)])
def test_the_length_at_which_variance_is_lost(shares: list[float], expected: float) -> None:
    assert measurements._crossing([1, 2, 4, 8], shares) == pytest.approx(expected)


def test_products_in_parts() -> None:
    layer, x = nn.Linear(8, 3), torch.randn(5, 8)
    torch.testing.assert_close(measurements._InParts(layer, 4)(x), layer(x))


def test_a_descent_compares_steps() -> None:
    found = measurements.descent(4.0, 4, 0, CPU)
    assert len(found["ratio"]) == len(found["progress"]) == 4
    assert all(ratio > 1 for ratio in found["ratio"])
    assert all(0.8 < progress < 1.1 for progress in found["progress"])


def test_a_student_learns() -> None:
    assert measurements.student("", "", 12, 0.01, 0, CPU)["loss"] < 0.7 * measurements.student("", "", 2, 0.01, 0, CPU)["loss"]


def values(run: Run) -> dict[str, Any]:
    noise = 1 + 1e-3 * run.seed
    if run.what == RING:
        return {
            "ring": [0.001 * ranks ** (0.5 * noise) for ranks in run.sizes],
            "one_shot": [0.001 * ranks ** (noise - 1) for ranks in run.sizes],
        }
    if run.what == SUMS:
        return {"lengths": [1, 2], "shares": [1.0, 0.5 + 1e-3 * run.seed], "length": 4.0 ** run.sizes[0] * noise ** run.sizes[0]}
    if run.what == ROLLOUT:
        return {"divergence": [1.0, 0.01 * noise], "difference": [1.0, 0.125 * noise]}
    if run.what == DESCENT:
        return {"ratio": [2.0, 1.5, 1.2], "progress": [0.9 * noise, 0.4 * noise**2, 0.4]}
    return {"loss": {FULL: 1.0, PRODUCTS: 1.0, ALL: 20.0}[run.rounds] * noise**2 ** (run.rounds == ALL)}


def test_verdicts() -> None:
    results = [studies.Result(run, values(run), 1.0, {}) for run in ReplicationsStudy().runs(SETTINGS)]
    report = Written(ReplicationsStudy(), SETTINGS, results).report()
    assert [claim.verdict for claim in report.claims] == [*["yes"] * 5, "yes (expected)", *["yes"] * 4]
    assert report.meaning.startswith("10 of 10 rows repeat in emulation, 0 do not, and 0 are undecided.")


def test_runs() -> None:
    runs = ReplicationsStudy().runs(SETTINGS)
    assert len(runs) == len(set(runs)) == 4 * (1 + 4 + 1 + 3 + 3)
    assert {run.what for run in runs} == {RING, SUMS, ROLLOUT, DESCENT, STUDENT}
    with pytest.raises(ValueError, match="ranks: must be at least two, in increasing order; got 8"):
        ReplicationsStudy().runs(Settings(ranks=(8,)))


@pytest.mark.slow
def test_the_quick_form(quick_study: Callable[..., studies.Plan]) -> None:
    report = quick_study("replications").report()
    assert len(report.claims) == 10
