"""What one run of a study gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

RunT = TypeVar("RunT")


@dataclass(frozen=True)
class Result(Generic[RunT]):
    """What one run gave.

    Attributes:
        run: Which run.
        values: What was measured, as JSON has it.
        seconds: How long that took.
        machine: Where, when and with which versions.
    """

    run: RunT
    values: Mapping[str, Any]
    seconds: float
    machine: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]
