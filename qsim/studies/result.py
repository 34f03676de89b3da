"""The result of one run of a study, and all results by their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

RunT = TypeVar("RunT")


@dataclass(frozen=True)
class Result(Generic[RunT]):
    """The result of one run.

    Attributes:
        run: The run.
        values: Measured values, as in JSON.
        seconds: Time that the run took.
        machine: The machine, the date and the versions.

    Example:
        >>> from qsim import studies
        >>> run = studies.plan("random-bits", form="quick").runs[0]
        >>> result = studies.Result(run, {"loss": 0.25}, seconds=1.5, machine={"device": "cpu"})
        >>> result["loss"]
        0.25
    """

    run: RunT
    values: Mapping[str, Any]
    seconds: float
    machine: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]
