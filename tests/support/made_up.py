"""Study reports on made-up results, so that verdicts follow from given numbers instead of one machine's training."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from qsim.studies import Claim, Study
from qsim.studies.result import Result
from qsim.studies.study import Run

Settings = TypeVar("Settings")


def claims(study: Study[Settings, Run], settings: Settings, values: Callable[[Run], dict[str, float]]) -> Sequence[Claim]:
    """A study's claims, given the values of its runs."""
    results = [Result(run, values(run), 1.0, {}) for run in study.runs(settings)]
    return study.report(settings, results).claims


def verdicts(study: Study[Settings, Run], settings: Settings, values: Callable[[Run], dict[str, float]]) -> list[bool | None]:
    """The verdicts of a study's claims, given the values of its runs."""
    return [claim.agrees for claim in claims(study, settings, values)]


def but(run: Run, **others: Any) -> Run:
    """The same run with other values."""
    return Run(**{**vars(run), **others})


def noise(study: Study[Any, Run], run: Run) -> float:
    """A number in (-1, 1) with another size for every kind of run, and alternating signs over seeds: it decides nothing."""
    return (-1.0) ** run.seed * zlib.crc32(study.key(but(run, seed=0)).encode()) / 2**32
