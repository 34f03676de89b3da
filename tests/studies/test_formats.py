"""The study `formats`: wide formats compared with full precision, coarse ones with wide ones, and the frontier with the grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean

import pytest
import torch

from qsim import studies
from qsim.studies.formats import FULL, FormatsStudy, Run, Settings
from qsim.studies.result import Result
from support import made_up

pytest.importorskip("sklearn")
CPU = torch.device("cpu")
ROUNDINGS = FormatsStudy().quick().roundings

Found = tuple[studies.Report, dict[tuple[str, str, int], Result[Run]]]


@pytest.fixture(scope="module")
def found(quick_study: Callable[..., studies.Plan]) -> Found:
    plan = quick_study("formats")
    of = {(r.run.format, r.run.rounding, r.run.seed): r for r in plan.store.results().values()}
    return plan.report(), of


def of_seeds(found: Found, name: str, rounding: str, what: str) -> list[float]:
    return [found[1][name, rounding, seed][what] for seed in range(FormatsStudy().quick().seeds)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_wide_format_is_full_precision_but_for_its_last_bits(found: Found, rounding: str) -> None:
    settings = FormatsStudy().quick()
    for seed, loss in enumerate(of_seeds(found, FULL, "nearest", "own_loss")):
        run = Run(
            data=settings.data, batch=settings.batch, steps=settings.steps, rate=settings.rate, format="e5m10", rounding=rounding, seed=seed
        )
        wide = FormatsStudy().measure(run, CPU)
        # Each operand is off by at most 2**-10 of itself, which changes the loss by up to 0.0002 over eight seeds. Seeds differ by 0.07.
        assert abs(wide["own_loss"] - loss) < 0.001
        assert wide["own_loss"] != loss, "but it does round"


# Noise of weights follows from their bits, so that another CPU's matrix kernels are like another seed. Added to the loss of full precision,
# over twelve seeds with the kernels of AVX-512 and plain SSE:
#
#                  E2M2              E4M2              E2M0              E4M0
#   nearest        0.014 to 0.029    0.010 to 0.025    0.046 to 2.9      0.020 to 0.105
#   stochastic     0.005 to 0.020    0.005 to 0.019    0.003 to 0.091    0.017 to 0.071
#
# A single one may be near zero. The mean of both formats with two bits, with nearest, and the mean logarithm below are five standard
# deviations from zero for two seeds.
def test_fewer_bits_are_worse(found: Found) -> None:
    full = of_seeds(found, FULL, "nearest", "own_loss")

    def added(name: str, how: str) -> list[float]:
        return [loss - own for loss, own in zip(of_seeds(found, name, how, "own_loss"), full, strict=True)]

    assert mean(more for exponent in (2, 4) for more in added(f"e{exponent}m2", "nearest")) > 0
    ratios = [
        max(coarse, 1e-3) / max(fine, 1e-3)
        for exponent in (2, 4)
        for how in ROUNDINGS
        for coarse, fine in zip(added(f"e{exponent}m0", how), added(f"e{exponent}m2", how), strict=True)
    ]
    assert mean(map(math.log, ratios)) > 0, ratios


def test_the_gain_of_a_bit_is_an_average_over_the_formats_of_a_width() -> None:
    settings = Settings(exponents=(2, 3), mantissas=(0, 1), roundings=("stochastic",), seeds=2)
    accuracies = {"e2m0": 0.5, "e3m0": 0.6, "e2m1": 0.8, "e3m1": 0.82, FULL: 0.9}
    results = [Result(run, {"own_accuracy": accuracies[run.format]}, 1.0, {}) for run in FormatsStudy().runs(settings)]
    (table,) = [
        part
        for part in FormatsStudy().report(settings, results).parts
        if isinstance(part, studies.Table) and "one more bit" in part.heading
    ]
    assert [[*row.values()] for row in table] == [
        ["3 to 4", "+10.0 [+10.0, +10.0]", "+30.0 [+30.0, +30.0]"],
        # From E2M1 to E3M1, and from E3M0 to E3M1.
        ["4 to 5", "+2.0 [+2.0, +2.0]", "+22.0 [+22.0, +22.0]"],
    ]


#: Formats of 3, 6 and 8 bits, and the other one of 8.
WIDTHS = Settings(exponents=(2, 4, 5), mantissas=(0, 2, 3), roundings=("stochastic",), seeds=4)


@pytest.mark.parametrize(
    ("eight", "narrow", "noise", "more_bits", "eight_are_enough"),
    [
        (0.949, 0.8, 0.0, True, True),
        (0.8, 0.949, 0.0, None, False),
        (0.9, 0.9, 0.3, None, None),
    ],
)
def test_verdicts_follow_from_accuracies(
    eight: float, narrow: float, noise: float, more_bits: bool | None, eight_are_enough: bool | None
) -> None:
    def values(run: Run) -> dict[str, float]:
        if run.format == FULL:
            return {"own_accuracy": 0.95 + 0.001 * run.seed}
        accuracy = narrow if run.format == "e2m0" else eight
        return {"own_accuracy": accuracy + 0.001 * run.seed + noise * made_up.noise(FormatsStudy(), run)}

    found = made_up.verdicts(FormatsStudy(), WIDTHS, values)
    assert found == [False if narrow > eight else more_bits, eight_are_enough, eight_are_enough]
