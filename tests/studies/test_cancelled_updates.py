"""The study `cancelled-updates`: counts, mixtures and the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from qsim import studies
from qsim.studies.cancelled_updates import FULL, KAHAN, NEAREST, STOCHASTIC, UPDATES, CancelledUpdates, Settings, layers_of, made, net
from qsim.studies.cancelled_updates.report import Findings
from qsim.studies.learners.images import images
from qsim.studies.result import Result

CPU = torch.device("cpu")
LAYERS = 5


@pytest.fixture(scope="module")
def findings(quick_study: Callable[..., studies.Plan]) -> Findings:
    plan = quick_study("cancelled-updates", looks=6)
    return Findings(plan.study, plan.settings, list(plan.store.results().values()))


def test_coarser_formats_cancel_more_and_kahan_carries_what_nearest_loses(findings: Findings) -> None:
    fine, coarse = findings.settings.formats
    assert findings.shares(FULL, NEAREST).mean() < findings.shares(fine, NEAREST).mean() < findings.shares(coarse, NEAREST).mean()
    for name in (fine, coarse):
        for update in UPDATES:
            cancelled, lost = findings.shares(name, update), findings.shares(name, update, lost=True)
            assert cancelled.shape == (1, len(findings.steps()))
            assert (cancelled >= 0).all()
            assert (cancelled <= 1).all()
            if update == KAHAN:
                # Most updates that do not change a weight are kept: the compensation has as many bits as the gradients.
                assert lost.sum() < cancelled.sum() / 2
            else:
                assert (lost == cancelled).all()


def test_memory_grows_layer_by_layer(findings: Findings) -> None:
    assert findings.layers == LAYERS
    layers = [sum(weight.numel() for weight in layer) for layer in layers_of(net(images("digits", CPU)))]
    total = sum(layers)
    for count in range(LAYERS + 1):
        kahan = sum(layers[LAYERS - count :])
        assert findings.values("memory", "bf16", STOCHASTIC, count) == [pytest.approx(2 + 2 * kahan / total)]
    assert findings.values("memory", FULL, NEAREST) == [4.0]


def test_training_learns_where_updates_arrive(findings: Findings) -> None:
    # Ten classes: guessing classifies a tenth correctly.
    for name, update in ((FULL, NEAREST), ("bf16", STOCHASTIC), ("bf16", KAHAN), ("e5m3", KAHAN)):
        assert findings.values("accuracy", name, update)[0] > 0.3
    assert findings.values("accuracy", "e5m3", NEAREST) < findings.values("accuracy", "e5m3", KAHAN)


def test_runs_are_each_there_once_and_share_all_but_the_update() -> None:
    study = CancelledUpdates()
    runs = study.runs(study.settings())
    assert len(set(runs)) == len(runs) == study.settings().seeds * (1 + 4 * 3 + LAYERS - 1)
    with pytest.raises(ValueError, match=r"mixed: must be one of the formats fp16, e5m3; got 'bf16'"):
        study.runs(replace(study.settings(), formats=("fp16", "e5m3")))


def report_on(counts: dict[str, list[int]], accuracy: dict[str, float]) -> Findings:
    """A report on numbers given by update, the same for both formats except for twice as many cancelled ones in the coarser one."""
    settings = Settings(formats=("bf16", "e5m3"), seeds=3)
    study, found = CancelledUpdates(), []
    for run in study.runs(settings):
        update = FULL if run.format == FULL else run.update
        first, last, carried = counts[update]
        more = 2 if run.format == "e5m3" else 1
        entries = [[step, 100, more * (first if step < 4 else last), carried] for step in range(8)]
        told = accuracy[update] + 0.0001 * run.seed
        found.append(Result(run, {"accuracy": told, "loss": 1.01 - told, "counts": entries, "memory": 2.0}, 1.0, {}))
    return Findings(study, settings, found)


def test_claims_come_out_either_way() -> None:
    exact = {FULL: [0, 0, 0]}
    papers = report_on(
        exact | {NEAREST: [10, 40, 0], STOCHASTIC: [10, 40, 0], KAHAN: [10, 40, 10]},
        {FULL: 0.95, NEAREST: 0.9, STOCHASTIC: 0.949, KAHAN: 0.951},
    )
    assert [claim.agrees for claim in papers.report().claims] == [True] * 10
    others = report_on(
        exact | {NEAREST: [40, 10, 0], STOCHASTIC: [10, 40, 0], KAHAN: [40, 40, 0]},
        {FULL: 0.9, NEAREST: 0.95, STOCHASTIC: 0.8, KAHAN: 0.7},
    )
    verdicts = [claim.agrees for claim in others.report().claims]
    # More updates are still cancelled in the coarser format.
    assert verdicts == [False, True, False, False, False, False, False, False, False, False]


def test_one_seed_decides_nothing_that_takes_several(findings: Findings) -> None:
    claims = {claim.source: claim for claim in findings.report().claims}
    assert claims["Figure 5"].agrees is None
    assert not math.isnan(findings.values("loss", "bf16", NEAREST)[0])


def test_a_run_is_the_same_again() -> None:
    study = CancelledUpdates()
    run = made(replace(study.quick(), steps=5, looks=5), "bf16", STOCHASTIC, 2, 1)
    first = study.measure(run, CPU)
    assert first == study.measure(run, CPU)
    assert [count[0] for count in first["counts"]] == [0, 1, 2, 3, 4]


def test_weights_begin_as_values_of_the_format() -> None:
    # Otherwise rounding would change them in the first step: updates as small as these must all be cancelled.
    study = CancelledUpdates()
    (count,) = study.measure(made(replace(study.quick(), steps=1, looks=1, rate=1e-30), "e5m3", NEAREST, 0, 0), CPU)["counts"]
    assert count[1] == count[2] > 0
