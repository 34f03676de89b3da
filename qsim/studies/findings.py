"""Findings of a study: its results by run, and the claims, figures and report that are made of them.

The words are in `wording/NAME.ini`: the setting, the captions, and each claim with its test and its rule, which are registered there before
results are committed. Code computes numbers and verdicts, and fills them in.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from configparser import RawConfigParser
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from qsim.studies.report import Claim, Picture, Report
from qsim.studies.result import Result
from qsim.studies.statistics import confidence_text, describe_bars
from qsim.studies.study import Run, Study
from qsim.text.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: One value for each seed.
Values = NDArray[np.float64]
SettingsT = TypeVar("SettingsT")


@cache
def wording(study: str) -> RawConfigParser:
    """The words of a study's report.

    Example:
        >>> wording("formats")["claim eight"]["test"]
        'accuracy in full precision minus that in the format, seed by seed'
    """
    found = RawConfigParser(delimiters=("=",), comment_prefixes=("#",))
    found.read_string((files("qsim.studies") / "wording" / f"{study}.ini").read_text(encoding="utf-8"))
    return found


class Findings(ABC, Generic[SettingsT]):
    """All results of a study, by their runs: the base of the findings that each study derives from them.

    Args:
        study: The study.
        settings: Its settings.
        results: The results of all runs.
    """

    def __init__(self, study: Study[Any, Run], settings: SettingsT, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings, self.results = study, settings, results
        self._words = wording(study.name)
        self._groups: dict[tuple[str, ...], dict[tuple[Any, ...], list[Result[Run]]]] = {}
        self.begin()

    def begin(self) -> None:
        """Derive what several findings need, once."""

    @abstractmethod
    def parts(self) -> Sequence[str | Table | Picture]:
        """Return paragraphs, tables and pictures, in order."""

    def claims(self) -> list[Claim]:
        """The claims, with their verdicts; by default, those of the module `claims` next to that of the report."""
        module = importlib.import_module(f"{type(self).__module__.rpartition('.')[0]}.claims")
        found: list[Claim] = module.claims(self)
        return found

    @abstractmethod
    def meaning(self) -> str:
        """The result in one sentence."""

    def title(self) -> str:
        """The heading; if it is empty, the study's question."""
        return ""

    def report(self) -> Report:
        """The complete report."""
        return Report(self.study, self.parts(), self.claims(), self.meaning(), self.title())

    def over_seeds(self, what: str, /, **fields: Any) -> Values:
        """One measured value for each seed, of the runs whose fields have these values."""
        return np.array([result[what] for result in self.seeded(**fields)], dtype=np.float64)

    def seeded(self, **fields: Any) -> list[Result[Run]]:
        """The result of each seed, of the runs whose fields have these values."""
        names = tuple(fields)
        if names not in self._groups:
            groups: dict[tuple[Any, ...], list[Result[Run]]] = defaultdict(list)
            for result in sorted(self.results, key=lambda result: result.run.seed):
                groups[tuple(getattr(result.run, name) for name in names)].append(result)
            self._groups[names] = dict(groups)
        return self._groups[names][tuple(fields.values())]

    def text(self, name: str, /, **values: Any) -> str:
        """A paragraph, filled with values, with the settings as `s` and the findings as `found`."""
        return self._filled("text", name, values)

    def picture(self, name: str, draw: Callable[[], Figure | Sequence[Figure]], /, **values: Any) -> Picture:
        """A figure, with its caption."""
        return Picture(name, self._filled("captions", name, values), draw)

    def claim(self, name: str, agrees: bool | None, /, **values: Any) -> Claim:
        """A claim, filled with measured values, and its verdict; its words say why it was known beforehand, if it was."""
        section = f"claim {name}"
        source, paper, measured, test, rule, power = (
            self._filled(section, key, values) for key in ("source", "claim", "measured", "test", "rule", "power")
        )
        expected = self._filled(section, "expected", values) if "expected" in self._words[section] else ""
        return Claim(source, paper, measured, agrees, test=test, rule=rule, power=power, expected=expected)

    def _filled(self, section: str, name: str, values: dict[str, Any]) -> str:
        template = " ".join(self._words[section][name].split("\n"))
        return template.format(s=self.settings, found=self, bars=describe_bars(), confidence=confidence_text(), **values)
