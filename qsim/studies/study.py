"""The definition of a study: settings, runs, the measurement of one run, and the report."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, ClassVar, Generic, TypeVar

import torch

from qsim.studies.report import Report
from qsim.studies.result import Result

SettingsT = TypeVar("SettingsT")
RunT = TypeVar("RunT")


class Study(ABC, Generic[SettingsT, RunT]):
    """An experiment made of independent runs.

    A run is a frozen dataclass of plain values, including its seed, and contains everything that its result depends on: so results can be
    looked up, runs can be distributed over processes and machines, and an interrupted study continues where it stopped.

    Attributes:
        name: Its name on the command line.
        question: Its question, in one line.
        source: Paper, with the section or figure.
        settings: The frozen dataclass of its settings. With the defaults, the study takes minutes on two cores; the
            fields are the options of the command line.
        run: Frozen dataclass of one run.
        version: Increased when a run measures something different: results of other versions are not used.

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
        """Return settings with which the study runs in seconds."""
        return self.settings()

    def full(self) -> SettingsT:
        """Return settings for a GPU."""
        return self.settings()

    def timed(self, settings: SettingsT) -> bool:
        """Whether runs measure time, so that no two may share a GPU."""
        return False

    @abstractmethod
    def runs(self, settings: SettingsT) -> Sequence[RunT]:
        """Return the runs that the settings ask for, each once."""

    def work(self, run: RunT) -> float:
        """Return the cost of a run relative to others, in any unit."""
        return 1.0

    @abstractmethod
    def measure(self, run: RunT, device: torch.device) -> dict[str, Any]:
        """Measure a run: return plain numbers, strings and lists of them."""

    @abstractmethod
    def report(self, settings: SettingsT, results: Sequence[Result[RunT]]) -> Report:
        """Write the report of all runs' results."""

    def key(self, run: RunT) -> str:
        """A run as text, the key of its result."""
        return json.dumps(asdict(run), sort_keys=True)  # type: ignore[call-overload]

    def read(self, fields: Mapping[str, Any]) -> RunT:
        """A run from its JSON fields."""
        return self.run(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


class WrittenStudy(Study[SettingsT, RunT]):
    """A study whose report is written by the class `_Written` of its module, or by `Written` of a module `report` next to it."""

    def report(self, settings: SettingsT, results: Sequence[Result[RunT]]) -> Report:
        """The report of all runs' results."""
        module = importlib.import_module(type(self).__module__)
        written = getattr(module, "_Written", None) or importlib.import_module(f"{module.__name__}.report").Written
        report: Report = written(self, settings, results).report()
        return report


def run_of(kind: type[RunT], settings: Any, **others: Any) -> RunT:
    """A run whose fields have the values of the settings with the same names, unless others are given.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Settings:
        ...     steps: int = 100
        ...     seeds: int = 2
        >>> @dataclass(frozen=True)
        ... class Trained:
        ...     format: str
        ...     steps: int
        ...     seed: int
        >>> run_of(Trained, Settings(), format="e4m3", seed=1)
        Trained(format='e4m3', steps=100, seed=1)
    """
    shared = {field.name: getattr(settings, field.name) for field in fields(kind) if hasattr(settings, field.name)}  # type: ignore[arg-type]
    return kind(**(shared | others))
