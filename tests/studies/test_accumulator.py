"""The study `accumulator`: errors of sums compared with theory and with exact sums, training with each accumulator, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from qsim import studies
from qsim.studies.accumulator import (
    CHAIN,
    CONTROL,
    NARROW,
    PROMOTED,
    SINGLE,
    SUMS,
    TRAINED,
    TRAINING,
    UNROUNDED,
    AccumulatorStudy,
    Run,
    Settings,
)  # fmt: skip
from qsim.studies.accumulator.dot_products import EXACT, MEAN_ONE, NORMAL, POSITIVE, WANG, errors, in_chunks
from qsim.studies.accumulator.report import Written
from qsim.studies.accumulator.training import begun, e4m3_points
from qsim.studies.result import Result
from support import made_up

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found(quick_study: Callable[..., studies.Plan]) -> tuple[studies.Report, Written]:
    plan = quick_study("accumulator")
    return plan.report(), Written(plan.study, plan.settings, list(plan.store.results().values()))


def lost_to_truncation(length: int, mean: float, block: int = 32, fraction: int = 13) -> float:
    """The share of a sum of positive products that a chain loses if each product loses half a unit of the sum on average."""
    total = 0.0
    for _ in range(length // block):
        exponent = math.floor(math.log2(max(total, 448.0)))
        total += block * (mean - 0.5 * 2.0 ** (exponent - fraction))
    return 1 - total / (length * mean)


def test_a_chain_loses_half_a_unit_of_the_sum_per_product() -> None:
    (error,) = errors(POSITIVE, CHAIN, (4096,), 0, CPU)["error"]
    # Products have at most eight significant bits: the largest are multiples of an eighth of the unit, and lose less than half of it.
    assert 0.75 < error / lost_to_truncation(4096, 224.0**2) < 1.0


def test_errors_are_those_of_exact_arithmetic(found: tuple[studies.Report, Written]) -> None:
    findings = found[1]
    # A number is off by at most 2**-4 of its magnitude, and a sum of n of random sign by sqrt(n) of that, in units that grow as it does.
    for rounding in findings.sums("error", NORMAL, EXACT, -1):
        assert 2.0**-6 < rounding < 2.0**-4
    # Promotion leaves the error of 128 products, however many there are.
    for kind in (NORMAL, POSITIVE):
        short, long, chain = (findings.sums("error", kind, name, at) for name, at in ((CHAIN, 0), (PROMOTED, 1), (CHAIN, 1)))
        assert all(after < 1.5 * before for before, after in zip(short, long, strict=True))
        assert all(after > 2 * before for before, after in zip(short, chain, strict=True))


def test_narrow_sums_of_numbers_around_one_end_at_4096() -> None:
    # Numbers below 2.74 are less than half of the 8 between 4096 and its neighbour in 1-6-9.
    assert errors(MEAN_ONE, NARROW, (8192,), 0, CPU)["sum"] == [4096.0]
    (share,) = errors(MEAN_ONE, WANG, (8192,), 0, CPU)["error"]
    assert 2.0**-13 < share < 0.01


def test_chunks_round_inside_and_outside() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(1, 16, shape, generator=draw).float() for shape in ((1, 130), (130, 1)))
    total = Fraction(0)
    for start in range(0, 130, 64):
        inner = Fraction(0)
        for x, y in zip(a[0, start : start + 64].tolist(), b[start : start + 64, 0].tolist(), strict=True):
            inner = rounded(inner + Fraction(x) * Fraction(y))
        total = rounded(total + inner)
    assert in_chunks(a, b).item() == total
    assert total != int((a @ b).item())


def rounded(x: Fraction) -> Fraction:
    """Positive numbers to ten significant bits, ties to even."""
    unit = Fraction(2) ** (math.floor(math.log2(x)) - 9)
    return round(x / unit) * unit


def test_models_differ_in_their_sums_only(found: tuple[studies.Report, Written]) -> None:
    settings = AccumulatorStudy().quick()
    runs = [run for run in AccumulatorStudy().runs(settings) if (run.what, run.seed) == (TRAINING, 1)][:3]
    assert [run.accumulate for run in runs] == [SINGLE, UNROUNDED, CHAIN]
    models = [begun(run, CPU) for run in runs]
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), model.parameters(), strict=True))
    assert e4m3_points(CHAIN) == replace(e4m3_points(SINGLE), accumulate=CHAIN)
    assert not any(hasattr(module, "points") for module in models[1].modules())
    assert not hasattr(models[2].head, "points")
    assert models[2].blocks[0].qkv.points == e4m3_points(CHAIN)
    # FP8 itself changes gradients more than the sums that it is used with, and the control more than any other.
    gradients = found[1].gradients
    assert gradients(PROMOTED).value < gradients(NARROW).value < gradients(CONTROL).value
    assert gradients(PROMOTED).value < gradients(UNROUNDED).value


def test_the_report_shows_the_measurements(found: tuple[studies.Report, Written]) -> None:
    report, findings = found
    sums, training = (part for part in report.parts if isinstance(part, studies.Table))
    (row,) = sums.filter(sum="H100 FP8")
    assert [*row.values()][-1] == f"{sum(findings.sums('error', POSITIVE, CHAIN, 1)) / 2:.1e}"
    assert [row["sums"] for row in training][:3] == ["FP32 sums", "no rounding", "H100 FP8"]
    assert training[2]["loss"].startswith(f"{sum(findings.losses(CHAIN)) / 2:.4f}")


#: For each claim, the values of runs that agree with it.
PAPER = {
    "largest": {NORMAL: 0.01, POSITIVE: 0.04},
    "promoted": 1.0,
    "sum": 4096.0,
    "chunks": 0.005,
    "loss": {CHAIN: 1.05, NARROW: 1.05, CONTROL: 1.2},
}
OTHER = {
    "largest": {NORMAL: 1e-4, POSITIVE: 1e-3},
    "promoted": 9.0,
    "sum": 16384.0,
    "chunks": 0.1,
    "loss": dict.fromkeys(TRAINED, 1.05),
}
OTHER_TRAINING = {CHAIN: 1.0, NARROW: 1.0, PROMOTED: 1.05, "Rounded('e6m9', chunk=64)": 1.05, CONTROL: 1.2}


def values(claimed: dict[str, object], noise: float = 0.0) -> Callable[[Run], dict[str, object]]:
    """Made-up results of a run."""

    def of(run: Run) -> dict[str, object]:
        luck = noise * made_up.noise(AccumulatorStudy(), run)
        if run.what != SUMS:
            loss = claimed["loss"].get(run.accumulate, 1.0) + luck  # type: ignore[attr-defined]
            return {"loss": loss, "gradients": dict.fromkeys((UNROUNDED, *TRAINED), 0.1)}
        growth = claimed["promoted"] if run.accumulate == PROMOTED else 9.0
        error = claimed["chunks"] * math.exp(luck) if run.operands == MEAN_ONE else 1e-3 * growth * math.exp(luck)  # type: ignore[operator]
        return {
            "error": [1e-3, error],
            "largest": [claimed["largest"].get(run.operands, 0.0) * (1 + 3 * luck)] * 2,  # type: ignore[attr-defined]
            "sum": [claimed["sum"]] * 2,
        }

    return of


SETTINGS = Settings(units=(), lengths=(4096, 16384), repeats=3, batch=64, seeds=3)


def test_verdicts_can_come_out_either_way() -> None:
    study = AccumulatorStudy()
    # The paper's matrices are not known well enough for a yes.
    assert made_up.verdicts(study, SETTINGS, values(PAPER)) == [None] + [True] * 8
    other = values({**OTHER, "loss": OTHER_TRAINING})
    assert made_up.verdicts(study, SETTINGS, other) == [False] * 4 + [True] + [False] * 4
    noisy = made_up.verdicts(study, SETTINGS, values(PAPER, noise=3.0))
    assert noisy[:2] + noisy[3:4] + noisy[5:] == [None] * 7


def test_without_a_visible_control_nothing_follows_from_training() -> None:
    verdicts = made_up.verdicts(AccumulatorStudy(), SETTINGS, values({**PAPER, "loss": {CHAIN: 1.05}}))
    assert verdicts[4:] == [False] + [None] * 4
    noisy = made_up.verdicts(AccumulatorStudy(), SETTINGS, values({**PAPER, "loss": {CHAIN: 1.05, CONTROL: 1.05}}, noise=1.0))
    assert noisy[4:] == [None] * 5


def test_short_sums_that_do_no_harm_decide_nothing_about_long_ones() -> None:
    short = replace(SETTINGS, batch=16)
    assert made_up.verdicts(AccumulatorStudy(), short, values({**OTHER, "loss": OTHER_TRAINING}))[5:] == [None, False, None, False]


def test_a_model_that_diverged_is_one_that_knows_nothing() -> None:
    def of(run: Run) -> dict[str, object]:
        found = values(PAPER)(run)
        return {**found, "loss": math.inf} if run.accumulate == CHAIN and run.what != SUMS else found

    study = AccumulatorStudy()
    findings = Written(study, SETTINGS, [Result(run, of(run), 1.0, {}) for run in study.runs(SETTINGS)])
    assert findings.losses(CHAIN).tolist() == [math.log(256)] * 3
    assert findings.claims()[5].agrees is True


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"lengths": (128,)}, "lengths: must be at least two, from few to many; got 128"),
        ({"lengths": (256, 128)}, "lengths: must be at least two, from few to many; got 256,128"),
        ({"heads": 3}, "heads: must divide the width of 32; got 3"),
        ({"seeds": 1}, "seeds: must be at least 2, for an interval; got 1"),
        ({"units": ("h100",)}, "unknown accumulator 'h100'"),
    ],
)
def test_invalid_settings_raise_an_error(chosen: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        studies.plan("accumulator", settings=chosen).todo()
