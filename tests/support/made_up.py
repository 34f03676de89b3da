"""Study reports on made-up results, so that verdicts follow from given numbers instead of one machine's training."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from qsim.studies import Study
from qsim.studies.result import Result

Settings, Run = TypeVar("Settings"), TypeVar("Run")


def verdicts(study: Study[Settings, Run], settings: Settings, values: Callable[[Run], dict[str, float]]) -> list[bool | None]:
    """The verdicts of a study's claims, given the values of its runs."""
    results = [Result(run, values(run), 1.0, {}) for run in study.runs(settings)]
    return [claim.agrees for claim in study.report(settings, results).claims]


def noise(study: Study[Any, Run], run: Run) -> float:
    """A number in (-1, 1) with another size for every kind of run, and alternating signs over seeds: it decides nothing."""
    kind = replace(run, seed=0)  # type: ignore[type-var]
    return (-1.0) ** run.seed * zlib.crc32(study.key(kind).encode()) / 2**32  # type: ignore[attr-defined]
