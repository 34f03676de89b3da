"""Storage of results: JSON lines in a folder, which are complete at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qsim.studies.result import Result
from qsim.studies.study import Study


@dataclass(frozen=True)
class Part:
    """A share of the runs, for one of several independent processes.

    Example:
        >>> Part.parse("2/4")
        Part(index=2, count=4)
    """

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parse `"i/n"`."""
        index, slash, count = text.partition("/")
        if not slash or not index.isdecimal() or not count.isdecimal() or not 1 <= int(index) <= int(count):
            raise ValueError(f"part: must be i/n with 1 <= i <= n, such as 2/4; got {text!r}")
        return cls(int(index), int(count))

    @property
    def file(self) -> str:
        """The name of the file that this part writes."""
        return "results.jsonl" if self.count == 1 else f"results-{self.index}-of-{self.count}.jsonl"


class Store:
    """The results of a study, in a folder that several parts may share.

    Each part writes its own file, and replaces it as a whole for every result: readers find complete lines, even if a process is killed.

    Args:
        folder: The folder, created with the first result.
        study: The study.
        part: The part, which determines the file to write.
    """

    def __init__(self, folder: Path, study: Study[Any, Any], part: Part = Part()) -> None:
        self.folder, self.study = folder, study
        self._file = folder / part.file

    def results(self) -> dict[str, Result[Any]]:
        """All results of this version of the study, from every part, by their runs' keys."""
        found: dict[str, Result[Any]] = {}
        for file in sorted(self.folder.glob("results*.jsonl")):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                result = self._read(line, f"{file}, line {number}")
                if result is not None:
                    found.setdefault(self.study.key(result.run), result)
        return found

    def add(self, result: Result[Any]) -> None:
        """Store one more result; it is on disk when this returns."""
        line = {"study": self.study.name, "version": self.study.version, **asdict(result)}
        before = self._file.read_text() if self._file.exists() else ""
        temporary = self._file.with_suffix(".tmp")
        with temporary.open("w") as out:
            out.write(before + json.dumps(line, allow_nan=True) + "\n")
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(self._file)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the part's file for this process; a process that is killed releases it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._file.with_suffix(".lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"{self._file} is being written by another process; give each its own --part i/n, or --out") from None
        try:
            yield
        finally:
            lock.release()

    def _read(self, line: str, where: str) -> Result[Any] | None:
        try:
            fields = json.loads(line)
            if fields["study"] != self.study.name:
                raise ValueError(f"{where}: a result of the study {fields['study']!r}, not of {self.study.name!r}; give it another --out")
            if fields["version"] != self.study.version:
                return None
            return Result(self.study.read(fields["run"]), fields["values"], fields["seconds"], fields["machine"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: not a result of the study {self.study.name!r} ({error})") from error
