"""Seeds added until verdicts are decided: where it looks, when it stops, and how wide its intervals are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qsim import studies
from qsim.studies import Claim, Report, Result
from qsim.studies.looks import Looks
from qsim.studies.statistics import above, confidence_text, mean
from support.coins import Coins, Settings, Toss


class Lean(Coins):
    """A claim that is decided once there are enough seeds."""

    enough = 4

    def report(self, settings: Settings, results: list[Result[Toss]]) -> Report:  # type: ignore[override]
        claim = Claim("the rim", "it leans", confidence_text(), True if settings.seeds >= self.enough else None)
        return Report(self, [], [claim], f"{settings.seeds} seeds.")


def test_it_stops_at_the_first_look_that_decides(tmp_path: Path) -> None:
    report = studies.run(Lean(), out=tmp_path, settings={"seeds": 2}, most_seeds=12)
    assert report.meaning == "4 seeds."
    # Looks at 2, 4, 8 and 12 seeds: each has a fourth of 5 %.
    assert report.claims[0].measured == "98.8 %"
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 8
    page = (tmp_path / "report.md").read_text()
    assert "the looks, fixed in advance, are at 2, 4, 8 and 12 seeds, and it ended at 4." in page
    assert "a confidence of 98.8 %" in page
    # Resumed, it looks at the same places again, and runs nothing.
    assert studies.run(Lean(), out=tmp_path, settings={"seeds": 2}, most_seeds=12).meaning == "4 seeds."
    assert confidence_text() == "95 %"


def test_it_ends_with_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lean, "enough", 100)
    report = studies.run(Lean(), out=tmp_path, settings={"seeds": 2}, most_seeds=3)
    assert (report.meaning, report.claims[0].verdict) == ("3 seeds.", "undecided")


def test_a_budget_is_larger_than_the_first_look(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="most seeds: must be above the 3 seeds of the first look; got 3"):
        studies.plan(Coins(), out=tmp_path, most_seeds=3)


def test_looking_repeatedly_is_rarely_wrong() -> None:
    """300 studies without an effect look at 4, 8, 16 and 32 seeds. At most 5 % may find one; with 95 % intervals 16 % of these do."""
    from qsim.studies.statistics import confidence

    looks, draws = Looks.doubling(4, 32), np.random.default_rng(0).normal(size=(300, 32))

    def found_something(level: float) -> float:
        with confidence(level):
            return float(np.mean([any(above(mean(each[:seeds].tolist())) is not None for seeds in looks.seeds) for each in draws]))

    # Three standard deviations of 300 draws with a probability of 5 % are 3.8 %.
    assert found_something(looks.confidence) < 0.088
    assert found_something(0.95) > 0.09
