"""The study `formats`: wide formats compared with full precision, coarse ones with wide ones, and the frontier with the grid."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import pytest
import torch

import qsim
from qsim import studies
from qsim.studies.formats import FULL, Formats, Run, Settings
from qsim.studies.result import Result
from support import made_up

pytest.importorskip("sklearn")
CPU = torch.device("cpu")
ROUNDINGS = Formats().quick().roundings

Found = tuple[studies.Report, dict[tuple[str, str, int], Result[Run]]]


@pytest.fixture(scope="module")
def found(quick_study: Callable[..., studies.Plan]) -> Found:
    plan = quick_study("formats")
    of = {(r.run.format, r.run.rounding, r.run.seed): r for r in plan.store.results().values()}
    return plan.report(), of


def of_seeds(found: Found, name: str, rounding: str, what: str) -> list[float]:
    return [found[1][name, rounding, seed][what] for seed in range(Formats().quick().seeds)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_wide_format_is_full_precision_but_for_its_last_bits(found: Found, rounding: str) -> None:
    settings = Formats().quick()
    full = of_seeds(found, FULL, "nearest", "own_loss")
    for seed, loss in enumerate(full):
        wide = Formats().measure(Run(settings.data, "e5m10", rounding, settings.batch, settings.steps, settings.rate, seed), CPU)
        # Each operand is off by at most 2**-10 of itself, while seeds differ by a percent and more.
        assert abs(wide["own_loss"] - loss) < (max(full) - min(full)) / 10
        assert wide["own_loss"] != loss, "but it does round"


# Noise of weights follows from their bits, so that another CPU's matrix kernels are like another seed. Added to the loss of full precision,
# over up to four seeds and the kernels of AVX-512, AVX2 and plain SSE:
#
#                  E4M2              E2M0
#   nearest        0.014 to 0.025    0.24 to 1.1
#   stochastic     0.006 to 0.021    0.025 to 0.069
#
# Stochastically, the mean of two seeds deviates by 0.003 with E4M2 and by 0.014 with E2M0: it is 4 and 3.5 deviations from zero.
def test_fewer_bits_are_worse(found: Found) -> None:
    full = mean(of_seeds(found, FULL, "nearest", "own_loss"))
    added = {(name, how): mean(of_seeds(found, name, how, "own_loss")) - full for name in ("e2m0", "e4m2") for how in ROUNDINGS}
    assert all(more > 0 for more in added.values()), added
    # Three values per sign under one scale: without randomness in the backward pass most of a gradient is lost.
    assert added["e2m0", "nearest"] > 0.1 > 2 * added["e4m2", "nearest"], added
    assert mean(of_seeds(found, "e2m0", "nearest", "own_accuracy")) < mean(of_seeds(found, "e2m0", "stochastic", "own_accuracy"))


def test_the_frontier_is_the_best_of_each_width(found: Found) -> None:
    settings = Formats().quick()
    (table,) = [part for part in found[0].parts if isinstance(part, studies.Table) and part.title == "The best format of each width"]
    for bits, *cells in table.rows:
        names = [name for name in settings.formats if qsim.format(name).bits == int(bits)]
        for rounding, cell in zip(settings.roundings, cells, strict=True):
            accuracies = {name: mean(of_seeds(found, name, rounding, "own_accuracy")) for name in names}
            best = max(accuracies, key=lambda name: accuracies[name])
            assert cell.startswith(f"{best.upper()}: {accuracies[best]:.1%} [")
    assert sorted(int(row[0]) for row in table.rows) == sorted({qsim.format(name).bits for name in settings.formats})


#: Formats of 3, 5, 6 and 8 bits.
WIDTHS = Settings(exponents=(2, 4), mantissas=(0, 3), seeds=4)


@pytest.mark.parametrize(
    ("eight", "narrow", "noise", "more_bits", "eight_are_enough"),
    [
        (0.949, 0.8, 0.0, True, True),
        # Fewer than eight are enough as well.
        (0.8, 0.949, 0.0, False, True),
        (0.8, 0.8, 0.0, None, False),
        (0.9, 0.9, 0.2, None, None),
    ],
)
def test_verdicts_follow_from_accuracies(
    eight: float, narrow: float, noise: float, more_bits: bool | None, eight_are_enough: bool | None
) -> None:
    def values(run: Run) -> dict[str, float]:
        if run.format == FULL:
            return {"own_accuracy": 0.95 + 0.001 * run.seed}
        accuracy = eight if run.format == "e4m3" else narrow
        return {"own_accuracy": accuracy + 0.001 * run.seed + noise * made_up.noise(Formats(), run)}

    assert made_up.verdicts(Formats(), WIDTHS, values) == [more_bits, eight_are_enough]
