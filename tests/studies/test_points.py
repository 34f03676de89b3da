"""The study `points`: which roundings apply when a net is tested, which have hardly any effect, and the report."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, stdev

import pytest
import torch

from qsim import studies
from qsim.studies.points import NONE, POINTS, PointsStudy, Run, Settings
from qsim.studies.result import Result
from support import made_up

pytest.importorskip("sklearn")
CPU = torch.device("cpu")
FORWARD = ("act", "weight")
BACKWARD = ("act_bwd", "weight_bwd", "grad")

Found = tuple[studies.Report, dict[tuple[str, str, str, int], Result[Run]]]


@pytest.fixture(scope="module")
def found(quick_study: Callable[..., studies.Plan]) -> Found:
    plan = quick_study("points")
    of = {(r.run.point, r.run.format, r.run.rounding, r.run.seed): r for r in plan.store.results().values()}
    return plan.report(), of


def losses(found: Found, point: str, rounding: str = "stochastic") -> list[float]:
    """Losses of nets with their rounding, by seed."""
    name, rounding = ("fp32", "nearest") if point == NONE else ("e2m1", rounding)
    return [found[1][point, name, rounding, seed]["own_loss"] for seed in range(PointsStudy().quick().seeds)]


def test_nets_round_when_they_are_tested_what_they_round_forward(found: Found) -> None:
    for (point, _, _, _), result in found[1].items():
        assert (result["own_loss"] != result["loss"]) == (point in FORWARD), point


# Five standard deviations of what stochastic rounding at a point adds to the loss, over twelve seeds with the kernels of AVX-512 and plain
# SSE. On average it adds at most 0.0005. Seeds differ by 0.07.
NOISE = {"act_bwd": 0.004, "weight_bwd": 0.005, "grad": 0.0125}


def test_unbiased_roundings_backward_add_only_noise(found: Found) -> None:
    assert NOISE.keys() == set(BACKWARD)
    for point, most in NOISE.items():
        assert all(0 < abs(loss - own) < most for loss, own in zip(losses(found, point), losses(found, NONE), strict=True)), point


@pytest.mark.parametrize("point", ["act_bwd", "weight_bwd"])
def test_four_bits_more_backward_add_nothing(found: Found, point: str) -> None:
    settings, full = PointsStudy().quick(), losses(found, NONE)
    for seed, loss in enumerate(full):
        way = {"point": point, "format": "e4m3", "rounding": "stochastic"}
        run = Run(data=settings.data, batch=settings.batch, steps=settings.steps, rate=settings.rate, **way, seed=seed)
        # At most a sixteenth of an operand, and not the same way twice: up to 0.0005 over eight seeds.
        assert abs(PointsStudy().measure(run, CPU)["own_loss"] - loss) < 0.002


def test_the_table_is_what_the_losses_say(found: Found) -> None:
    full = losses(found, NONE)
    for rounding in PointsStudy().quick().roundings:
        title = f"Added to a test loss of {mean(full):.3f}, {rounding}"
        (table,) = [part for part in found[0].parts if isinstance(part, studies.Table) and part.heading == title]
        for (point, label), row in zip(POINTS.items(), table, strict=True):
            added = [loss - own for loss, own in zip(losses(found, point, rounding), full, strict=True)]
            # For two seeds: Student's t with one degree of freedom, 12.706.
            half = 12.7062 * stdev(added) / 2**0.5
            assert [*row.values()] == [label, f"{mean(added):+.3f} [{mean(added) - half:+.3f}, {mean(added) + half:+.3f}]"]


def as_in_the_paper(run: Run) -> float:
    worse = 0.01 if run.rounding == "nearest" else 0.0
    return worse + {"act": 0.1, "weight": 0.03, "act_bwd": 0.01, "weight_bwd": 0.01, "grad": 0.02}[run.point]


def the_other_way(run: Run) -> float:
    better = 0.01 if run.rounding == "nearest" else 0.0
    return {"act": 0.02, "weight": 0.2, "act_bwd": 0.1, "weight_bwd": 0.1, "grad": 0.1}[run.point] - better


def undecided(run: Run) -> float:
    return made_up.noise(PointsStudy(), run)


@pytest.mark.parametrize(("added", "verdict"), [(as_in_the_paper, True), (the_other_way, False), (undecided, None)])
def test_verdicts_follow_from_losses(added: Callable[[Run], float], verdict: bool | None) -> None:
    def values(run: Run) -> dict[str, float]:
        off = 0.0001 * made_up.noise(PointsStudy(), run)
        return {"own_loss": 0.5 + 0.001 * run.seed + off + (0.0 if run.point == NONE else added(run))}

    assert made_up.verdicts(PointsStudy(), Settings(formats=("e2m1",)), values) == [verdict] * 3
