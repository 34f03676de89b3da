"""What a study is: settings, the runs that they ask for, how one run is measured, and what all of them together say."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Generic, TypeVar

import torch

from qsim.studies.report import Report
from qsim.studies.result import Result

SettingsT = TypeVar("SettingsT")
RunT = TypeVar("RunT")


class Study(ABC, Generic[SettingsT, RunT]):
    """An experiment made of runs that know nothing of each other.

    A run is a frozen dataclass of plain values, among them its seed, and holds everything that its result depends on: so a result can be
    found again, runs can be shared out among processes and machines, and a study that was interrupted goes on where it stopped.

    Attributes:
        name: What the command line calls it.
        question: What it asks, in one line.
        source: The paper, and where in it.
        settings: The frozen dataclass of what may be chosen. Its defaults are those of a study that ends in minutes on two cores, and its
            fields are the options of the command line.
        run: The frozen dataclass of one run.
        version: Counts how often what a run measures has changed: results of other versions are not used.

    Example:
        >>> from dataclasses import dataclass
        >>> from qsim import studies
        >>> @dataclass(frozen=True)
        ... class Settings:
        ...     seeds: int = 2
        >>> @dataclass(frozen=True)
        ... class Toss:
        ...     seed: int
        >>> class Coin(studies.Study[Settings, Toss]):
        ...     name, question, source = "coin", "Is it fair?", "a pocket"
        ...     settings, run = Settings, Toss
        ...     def runs(self, settings):
        ...         return [Toss(seed) for seed in range(settings.seeds)]
        ...     def measure(self, run, device):
        ...         return {"heads": run.seed % 2}
        ...     def report(self, settings, results):
        ...         return studies.Report(self, [], [], f"{sum(result['heads'] for result in results)} of {len(results)}")
        >>> Coin().key(Toss(1))
        '{"seed": 1}'
    """

    name: ClassVar[str]
    question: ClassVar[str]
    source: ClassVar[str]
    settings: type[SettingsT]
    run: type[RunT]
    version: ClassVar[int] = 1

    def quick(self) -> SettingsT:
        """Settings for a look at whether all works, in seconds."""
        return self.settings()

    def full(self) -> SettingsT:
        """Settings for a GPU."""
        return self.settings()

    @abstractmethod
    def runs(self, settings: SettingsT) -> Sequence[RunT]:
        """The runs that the settings ask for, each once."""

    def work(self, run: RunT) -> float:
        """How long a run takes beside the others, in any unit."""
        return 1.0

    @abstractmethod
    def measure(self, run: RunT, device: torch.device) -> dict[str, Any]:
        """Carries out a run: plain numbers, strings and lists of them."""

    @abstractmethod
    def report(self, settings: SettingsT, results: Sequence[Result[RunT]]) -> Report:
        """What the results of all runs say."""

    def key(self, run: RunT) -> str:
        """A run as text: what its result is found by."""
        return json.dumps(asdict(run), sort_keys=True)  # type: ignore[call-overload]

    def read(self, fields: Mapping[str, Any]) -> RunT:
        """A run from what JSON kept of it."""
        return self.run(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
