"""The study `random-bits`: the rounding's bias compared with its prediction from the number of bits, and nets with those with all bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from qsim import studies
from qsim.studies.random_bits import BACKWARD, BIAS, FULL, SAMPLES, UPDATE, RandomBitsStudy, Run, Settings
from qsim.studies.result import Result
from support import made_up
from support.bounds import bernstein

pytest.importorskip("sklearn")

Found = tuple[studies.Report, dict[tuple[str, str, int, bool, int], Result[Run]]]


@pytest.fixture(scope="module")
def found(quick_study: Callable[..., studies.Plan]) -> Found:
    plan = quick_study("random-bits")
    of = {(r.run.what, r.run.format, r.run.bits, r.run.correction, r.run.seed): r for r in plan.store.results().values()}
    return plan.report(), of


def losses(found: Found, name: str, bits: int, correction: bool, what: str = BACKWARD) -> list[float]:
    return [found[1][what, name, bits, correction, seed]["loss"] for seed in range(RandomBitsStudy().quick().seeds)]


def probabilities(bits: int, correction: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions between two neighbours, and the probability that a number there is rounded up."""
    place = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    return place, (place * 2**bits + 0.5 * correction).floor() / 2**bits


@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("bits", RandomBitsStudy().quick().bits)
def test_biases_are_those_of_the_number_of_bits(found: Found, bits: int, correction: bool) -> None:
    due = 0.0 if correction else -(0.5 ** (bits + 1))
    place, up = probabilities(bits, correction)
    # An error is 1 - position or -position, by the law of total variance.
    assert (up - place).mean().item() == pytest.approx(due, abs=1e-4)
    variance = (up * (1 - up)).mean().item() + (up - place).var().item()
    settings = RandomBitsStudy().quick()
    off = bernstein(variance, 2.0, SAMPLES, tests=2 * len(settings.bits) * settings.seeds)
    assert correction or off < abs(due), "else 0 would do as well"
    for seed in range(settings.seeds):
        assert abs(found[1][BIAS, settings.formats[0], bits, correction, seed]["bias"] - due) <= off


def test_claims_about_biases_are_decided_by_them(found: Found) -> None:
    assert [claim.agrees for claim in found[0].claims if claim.source == "this library's contract"] == [True, True]
    (table,) = [part for part in found[0].parts if isinstance(part, studies.Table) and part.heading == "Mean error in units of the gap"]
    assert [(row["random bits"], row["truncated, in theory"]) for row in table] == [("1", "-0.25"), ("6", "-0.00781")]


# Losses minus that of 32 bits, over twelve seeds with the kernels of AVX-512 and plain SSE: the range, and its standard deviation.
#
#                        backward in E4M3            updates in E5M3
#   1 bit                 0.029 to 0.034 (0.002)     -0.018 to 0.079 (0.03)
#   1 bit, corrected     -0.003 to -0.001 (0.001)     0.29 to 0.42 (0.03)
#   6 bits                0.0006 to 0.0012 (0.0002)   0.017 to 0.037 (0.006)
#   6 bits, corrected    -0.0002 to 0.0003 (0.0002)  -0.006 to 0.008 (0.003)
#   full precision       -0.0005 to 0.0009 (0.0004)  -0.010 to 0.027 (0.012)


def test_nets_lose_with_one_truncated_bit_and_not_with_a_corrected_one(found: Found) -> None:
    """One bit takes a quarter of a gap, 1/64 to 1/32, from inputs and from gradients: a learning rate that is lower by 3 to 6 %."""
    cut, corrected, six, every = (losses(found, "e4m3", *which) for which in ((1, False), (1, True), (6, False), (32, False)))
    for seed, loss in enumerate(every):
        assert cut[seed] > loss + 0.015
        # Without bias only noise remains.
        assert abs(corrected[seed] - loss) < 0.01
        assert abs(six[seed] - loss) < 0.01
        assert abs(losses(found, FULL, 32, False)[seed] - loss) < 0.01


def test_truncated_bits_lose_small_updates(found: Found) -> None:
    """An update below a gap / 2**6 never changes a weight with six truncated bits, and does with six corrected ones."""
    cut, corrected, noisy, every = (
        losses(found, "e5m3", bits, correction, UPDATE) for bits, correction in ((6, False), (6, True), (1, True), (32, False))
    )
    for seed, loss in enumerate(every):
        assert cut[seed] > loss
        assert abs(corrected[seed] - loss) < 0.02
        # One bit is up or down with a probability of 1/2 wherever an update is between a quarter and three quarters of a gap.
        assert noisy[seed] > loss + 0.15


@pytest.mark.parametrize(
    ("one", "six", "noise", "verdict"),
    [(0.5, 0.01, 0.0, True), (0.5, 0.2, 0.0, False), (0.5, 0.01, 0.3, None), (0.0, 0.0, 0.0, None)],
    ids=["enough", "too few", "noise", "nothing can fail"],
)
def test_whether_six_bits_do_follows_from_losses(one: float, six: float, noise: float, verdict: bool | None) -> None:
    def values(run: Run) -> dict[str, float]:
        added = {1: one, 6: six}.get(run.bits, 0.0) + (noise if run.bits == 6 else 1e-4) * made_up.noise(RandomBitsStudy(), run)
        return {"bias": 0.0, "loss": 0.9 + 0.01 * run.seed + added}

    assert made_up.verdicts(RandomBitsStudy(), Settings(seeds=4), values)[:6] == [verdict] * 6


def test_the_answer_is_the_largest_number_of_bits_that_any_case_needs() -> None:
    def values(run: Run) -> dict[str, float]:
        needed = (4 if run.correction else 6) if run.what == UPDATE else 2
        harmless = run.bits >= needed or run.format == "e4m0"
        return {"bias": 0.0, "loss": 0.9 + 0.01 * run.seed + (0.0 if harmless else 0.5) + 1e-4 * made_up.noise(RandomBitsStudy(), run)}

    study, settings = RandomBitsStudy(), Settings(seeds=4)
    report = study.report(settings, [Result(run, values(run), 1.0, {}) for run in study.runs(settings)])
    assert report.meaning == (
        "6 random bits are enough in all cases tried if probabilities are truncated, and 4 if they are rounded to the nearest multiple "
        "(corrected). Truncated or corrected, it takes 2 or 2 for backward passes in E4M3 and 6 or 4 for updates of E5M3 weights. For "
        "backward passes in E4M0, even 1 truncated bit adds no test loss that shows. Enough means at most a tenth of the test loss that "
        "1 truncated bit adds."
    )


@pytest.mark.parametrize(("cut", "corrected"), [(-0.25, 0.0), (-0.2505, 0.0005), (-0.252, 0.002), (0.0, -0.25)])
def test_verdicts_about_biases_follow_from_them(cut: float, corrected: float) -> None:
    def values(run: Run) -> dict[str, float]:
        return {"bias": corrected if run.correction else cut, "loss": 0.9}

    settings = replace(RandomBitsStudy().quick(), bits=(1, 6))
    assert made_up.verdicts(RandomBitsStudy(), settings, values)[-2:] == [abs(cut + 0.25) < 1e-3, abs(corrected) < 1e-3]
