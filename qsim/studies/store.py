"""Storage of results: JSON lines in a folder, which are complete at any moment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from qsim.studies.result import Result
from qsim.studies.study import Study, values_of
from qsim.text.files import FileError, check_shape, reading, write_whole

#: The shape of a line; see `text.files.check_shape`.
_MACHINE = {"device": str, "torch": str, "qsim": str, "date": str, "commit?": str, "python?": str}
_LINE = {"study": str, "version": int, "run": {}, "values": {}, "seconds": (float, int), "machine": _MACHINE}


class _MeasuredValues(dict[str, Any]):
    """The values in a line; a report that misses one names the line."""

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), where: str = "a copy") -> None:
        super().__init__(values)
        self._where = where

    def __missing__(self, name: str) -> NoReturn:
        raise FileError(f"studies: {self._where} is malformed: its values lack {name!r}")


class Store:
    """The results of a study, in a folder.

    The file is replaced as a whole for every result: readers find complete lines, even if a process is killed.

    Args:
        folder: The folder, created with the first result.
        study: The study.
    """

    def __init__(self, folder: Path, study: Study[Any, Any]) -> None:
        self.folder, self.study = folder, study
        self._file = folder / "results.jsonl"

    def results(self) -> dict[str, Result[Any]]:
        """All results of this version of the study, by their runs' keys."""
        with reading("studies", self._file):
            lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        read = [self._read(line, f"{self._file}, line {number}") for number, line in enumerate(lines, 1)]
        return {self.study.key(result.run): result for result in read if result is not None}

    def add(self, result: Result[Any]) -> None:
        """Store one more result; it is on disk when this returns."""
        own = {"study": self.study.name, "version": self.study.version, "run": values_of(result.run)}
        line = {**own, "values": result.values, "seconds": result.seconds, "machine": result.machine}
        before = self._file.read_text(encoding="utf-8") if self._file.exists() else ""
        ends = "\n" if before and not before.endswith("\n") else ""
        write_whole(self._file, f"{before}{ends}{json.dumps(line, allow_nan=True)}\n")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the file for this process; a process that is killed releases it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._file.with_suffix(".lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"{self._file} is being written by another process; give each its own --out") from None
        try:
            yield
        finally:
            lock.release()

    def _read(self, line: str, where: str) -> Result[Any] | None:
        with reading("studies", where):
            fields = json.loads(line)
            check_shape(fields, _LINE, "it")
            if fields["study"] != self.study.name:
                other = f"a result of the study {fields['study']!r}, not of {self.study.name!r}; give it another --out"
                raise FileError(f"studies: {where}: {other}")
            if fields["version"] != self.study.version:
                return None
            seconds = float(fields["seconds"])
            if not 0 <= seconds < math.inf:
                raise FileError(f"studies: {where} is malformed: it took {seconds} seconds")
            run = self.study.read(fields["run"])
            hash(run)  # results are found by their runs
            return Result(run, _MeasuredValues(fields["values"], where), seconds, fields["machine"])
