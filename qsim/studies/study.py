"""The definition of a study: settings, runs, the measurement of one run, and the report."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from qsim.studies.choices import require
from qsim.studies.report import Report
from qsim.studies.result import Result

SettingsT = TypeVar("SettingsT")
RunT = TypeVar("RunT")


class Run:
    """One run of a study: plain values by their names, which are attributes. Runs with equal values are equal.

    Example:
        >>> Run(format="e4m3", seed=1).format, Run(seed=1) == Run(seed=1)
        ('e4m3', True)
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a run does not change: {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(sorted(vars(self).items())))

    def __repr__(self) -> str:
        return f"Run({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A value."""


class Study(ABC, Generic[SettingsT, RunT]):
    """An experiment made of independent runs.

    A run consists of plain values, including its seed, and contains everything that its result depends on: so results can be looked up,
    runs can be distributed over processes and machines, and an interrupted study continues where it stopped.

    Attributes:
        name: Its name on the command line.
        question: Its question, in one line.
        source: Paper, with the section or figure.
        settings: The frozen dataclass of its settings. With the defaults, the study takes minutes on two cores; the
            fields are the options of the command line.
        run: Frozen dataclass of one run, or `Run`.
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
        return json.dumps(values_of(run), sort_keys=True)

    def read(self, fields: Mapping[str, Any]) -> RunT:
        """A run from its JSON fields."""
        return self.run(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def values_of(run: Any) -> dict[str, Any]:
    """The values of a run, by their names."""
    return vars(run) if isinstance(run, Run) else asdict(run)


class TrialStudy(Study[SettingsT, Run]):
    """A study that says for each seed what its runs do, and whose report is made of its findings.

    The report is written by the class `_Written` of the study's module, or by `Written` of a module `report` next to it.

    Attributes:
        quick_form: Settings with which the study runs in seconds; by default its usual ones.
        full_form: Settings for a GPU; by default its usual ones.
        shared: The settings that are values of every run.
        added: The values of runs that results of earlier versions do not have.
        counts: The settings, of those that there are, that must be at least 1.
    """

    run = Run
    quick_form: ClassVar[Any] = None
    full_form: ClassVar[Any] = None
    shared: ClassVar[tuple[str, ...]] = ()
    added: ClassVar[Mapping[str, Any]] = {}
    counts: ClassVar[tuple[str, ...]] = ("steps", "batch", "batches")

    def quick(self) -> SettingsT:
        """Return settings with which the study runs in seconds."""
        return self.quick_form or super().quick()

    def full(self) -> SettingsT:
        """Return settings for a GPU."""
        return self.full_form or super().full()

    def check(self, settings: SettingsT) -> None:
        """Raise an error for settings of which no report can be written."""

    @abstractmethod
    def ways(self, settings: SettingsT, seed: int) -> Iterable[Mapping[str, Any]]:
        """Return what each run of a seed does: the values that are not shared."""

    def runs(self, settings: SettingsT) -> Sequence[Run]:
        """Every way with every seed."""
        for name in self.counts:
            given = getattr(settings, name, 1)
            require(settings, name, min(given if isinstance(given, tuple) else [given], default=1) >= 1, "be at least 1")
        self.check(settings)
        common = {name: getattr(settings, name) for name in self.shared}
        found = [Run(**{**common, **way, "seed": seed}) for seed in self.seeds(settings) for way in self.ways(settings, seed)]
        return list(dict.fromkeys(found))

    def seeds(self, settings: SettingsT) -> Iterable[int]:
        """The seeds of the runs."""
        return range(settings.seeds)  # type: ignore[attr-defined]

    def read(self, fields: Mapping[str, Any]) -> Run:
        """A run from its JSON fields."""
        values = {**self.added, **fields}
        if missing := {*self.shared, "seed"} - {*values}:
            raise ValueError(f"its run lacks {', '.join(sorted(missing))}")
        return super().read(values)

    def report(self, settings: SettingsT, results: Sequence[Result[Run]]) -> Report:
        """The report of all runs' results."""
        module = importlib.import_module(type(self).__module__)
        written = getattr(module, "_Written", None) or importlib.import_module(f"{module.__name__}.report").Written
        report: Report = written(self, settings, results).report()
        return report
