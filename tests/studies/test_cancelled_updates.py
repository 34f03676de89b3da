"""The study `cancelled-updates`: counts, mixtures and the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from qsim import studies
from qsim.studies.cancelled_updates import (
    BOTH,
    FULL,
    KAHAN,
    NEAREST,
    STOCHASTIC,
    UPDATES,
    CancelledUpdatesStudy,
    Run,
    Settings,
    layers_of,
    net,
)
from qsim.studies.cancelled_updates.report import Written
from qsim.studies.learners.images import images
from qsim.studies.result import Result
from support import made_up

CPU = torch.device("cpu")
LAYERS = 5


@pytest.fixture(scope="module")
def findings(quick_study: Callable[..., studies.Plan]) -> Written:
    plan = quick_study("cancelled-updates", looks=6)
    return Written(plan.study, plan.settings, list(plan.store.results().values()))


def test_coarser_formats_cancel_more_and_kahan_carries_what_nearest_loses(findings: Written) -> None:
    fine, coarse = findings.settings.formats
    assert findings.shares(FULL, NEAREST).mean() < findings.shares(fine, NEAREST).mean() < findings.shares(coarse, NEAREST).mean()
    for name in (fine, coarse):
        for update in findings.settings.updates:
            cancelled, lost = findings.shares(name, update), findings.shares(name, update, lost=True)
            assert cancelled.shape == (1, len(findings.steps()))
            assert (cancelled >= 0).all()
            assert (cancelled <= 1).all()
            if update == KAHAN:
                # Most updates that do not change a weight are kept: the compensation has as many bits as the gradients.
                assert lost.sum() < cancelled.sum() / 2
            else:
                assert (lost == cancelled).all()


def test_memory_grows_layer_by_layer(findings: Written) -> None:
    assert findings.layers == LAYERS
    layers = [sum(weight.numel() for weight in layer) for layer in layers_of(net(images("digits", CPU)))]
    total = sum(layers)
    for count in range(LAYERS + 1):
        kahan = sum(layers[LAYERS - count :])
        assert findings.of("memory", "bf16", STOCHASTIC, count) == [pytest.approx(2 + 2 * kahan / total)]
    assert findings.of("memory", FULL, NEAREST) == [4.0]


def test_training_learns_where_updates_arrive(findings: Written) -> None:
    (full,) = findings.of("loss", FULL, NEAREST)
    # Six standard deviations of the differences, over twelve seeds with the kernels of AVX-512 and plain SSE.
    for update in (STOCHASTIC, KAHAN):
        (loss,) = findings.of("loss", "bf16", update)
        assert abs(loss - full) < 0.06, update
    # In E5M3 nearest rounding loses nearly all updates, and does not get below ten equal probabilities: 2.291 to 2.302.
    assert abs(findings.of("loss", "e5m3", NEAREST)[0] - math.log(10)) < 0.03
    assert findings.of("loss", "e5m3", KAHAN)[0] < findings.of("loss", "e5m3", NEAREST)[0]


def test_a_unit_rounds_all_but_the_weights() -> None:
    study = CancelledUpdatesStudy()
    runs = [run for run in study.runs(Settings(steps=4, looks=4, batch=4)) if run.format == FULL and run.seed == 0]
    assert [run.unit for run in runs] == ["", "bf16"]
    plain, rounded = (study.measure(run, torch.device("cpu")) for run in runs)
    assert plain["loss"] != rounded["loss"] == pytest.approx(plain["loss"], rel=0.01)
    assert rounded["memory"] == 4.0


def test_runs_are_each_there_once_and_share_all_but_the_update() -> None:
    study = CancelledUpdatesStudy()
    runs = study.runs(study.settings())
    assert len(set(runs)) == len(runs) == study.settings().seeds * (2 + 3 * 3 + LAYERS - 1)
    with pytest.raises(ValueError, match=r"mixed: must be one of the formats fp16, e5m3; got 'bf16'"):
        study.runs(replace(study.settings(), formats=("fp16", "e5m3")))


def verdicts(counts: dict[str, list[int]], accuracy: dict[str, float]) -> list[bool | None]:
    """Verdicts on numbers given by update, the same for both formats except for twice as many cancelled ones in the coarser one."""

    def values(run: Run) -> dict[str, Any]:
        update = FULL if run.format == FULL else run.update
        first, last, carried = counts[update]
        more = 2 if run.format == "e5m3" else 1
        entries = [[step, 100, more * (first if step < 4 else last), carried] for step in range(8)]
        reached = accuracy[update] + 0.0005 * made_up.noise(CancelledUpdatesStudy(), run)
        return {"accuracy": reached, "loss": 1.01 - reached, "counts": entries, "memory": 2.0}

    return made_up.verdicts(CancelledUpdatesStudy(), Settings(formats=("bf16", "e5m3"), seeds=3), values)


def test_claims_come_out_either_way() -> None:
    exact = {FULL: [0, 0, 0]}
    papers = verdicts(
        exact | {NEAREST: [10, 40, 0], STOCHASTIC: [10, 40, 0], KAHAN: [10, 40, 10]},
        {FULL: 0.95, NEAREST: 0.9, STOCHASTIC: 0.95, KAHAN: 0.953},
    )
    assert papers == [True] * 13
    others = verdicts(
        exact | {NEAREST: [40, 10, 0], STOCHASTIC: [10, 40, 0], KAHAN: [40, 40, 0]},
        {FULL: 0.95, NEAREST: 0.9, STOCHASTIC: 0.8, KAHAN: 0.7},
    )
    # More updates are still cancelled in the coarser format, and nearest still loses.
    assert others == [False, True, False, True, True, True, True, False, False, False, False, False, True]


def test_both_cures_and_curves_have_their_claims() -> None:
    """With nearest, the loss falls behind in the second half of training only; other ways follow full precision."""

    def values(run: Run) -> dict[str, Any]:
        behind = run.format != FULL and run.update == NEAREST
        loss = 0.5 * (1.2 if behind else 1) + 0.001 * made_up.noise(CancelledUpdatesStudy(), run)
        curve = [[step, loss if step > 4 else 0.5, 0.9] for step in range(1, 9)]
        entries = [[step, 100, 10 + step, 5 * (run.update in (KAHAN, BOTH))] for step in range(8)]
        return {"accuracy": 0.8 if behind else 0.9, "loss": loss, "counts": entries, "memory": 2.0, "curve": curve}

    settings = Settings(model="resnet-18", formats=("bf16",), updates=tuple(UPDATES), arithmetic="format", units=(), curve=8, seeds=3)
    study = CancelledUpdatesStudy()
    assert len(study.runs(settings)) == 3 * (1 + len(UPDATES))
    report = study.report(settings, [Result(run, values(run), 1.0, {}) for run in study.runs(settings)])
    assert [claim.source for claim in report.claims if "kahan+stochastic" in claim.paper] == ["Appendix D.3, both on one weight"] * 2
    assert {claim.source: claim.agrees for claim in report.claims}["Figure 3, over training"] is True
    page = report.markdown("here")
    assert "ResNet-18 with 11,171,018 parameters" in page or "A net learns digits" in page
    assert "left out" not in page
    assert "The optimizer, too, rounds" in page


def test_a_match_that_could_not_fail_decides_nothing() -> None:
    """Where nearest does as well as full precision, so does everything."""
    counts = {FULL: [0, 0, 0], NEAREST: [10, 40, 0], STOCHASTIC: [10, 40, 0], KAHAN: [10, 40, 10]}
    found = verdicts(counts, dict.fromkeys((FULL, NEAREST, STOCHASTIC, KAHAN), 0.95))
    assert found[3:] == [None] * 10


def test_a_match_is_closer_to_full_precision_than_nearest_is() -> None:
    """Half a point is little, but not where nearest loses no more."""
    counts = {FULL: [0, 0, 0], NEAREST: [10, 40, 0], STOCHASTIC: [10, 40, 0], KAHAN: [10, 40, 10]}
    reached = {FULL: 0.95, STOCHASTIC: 0.945, KAHAN: 0.95}
    assert verdicts(counts, {**reached, NEAREST: 0.9})[7:9] == [True, True]
    assert verdicts(counts, {**reached, NEAREST: 0.945})[7:9] == [False, True]


def test_one_seed_decides_nothing_that_takes_several(findings: Written) -> None:
    assert {claim.source: claim for claim in findings.claims()}["Figure 5"].agrees is None
    assert not math.isnan(findings.of("loss", "bf16", NEAREST)[0])


def test_a_run_is_the_same_again() -> None:
    study = CancelledUpdatesStudy()
    run = next(run for run in study.runs(replace(study.quick(), steps=5, looks=5)) if run.kahan_layers == 2)
    first = study.measure(run, CPU)
    assert first == study.measure(run, CPU)
    assert [count[0] for count in first["counts"]] == [0, 1, 2, 3, 4]


def test_weights_begin_as_values_of_the_format() -> None:
    # Otherwise rounding would change them in the first step: updates as small as these must all be cancelled.
    study = CancelledUpdatesStudy()
    run = next(run for run in study.runs(study.quick()) if (run.format, run.update) == ("e5m3", NEAREST))
    (count,) = study.measure(made_up.but(run, steps=1, looks=1, rate=1e-30), CPU)["counts"]
    assert count[1] == count[2] > 0
