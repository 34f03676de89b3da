"""Faults planted in the sources, one at a time: which of them no test sees. `python tests/support/mutants.py --help` says more.

The tables are `tests/mutants/*.txt`. A section is a file and the tests that concern it, and each fault in it is a sentence, what stands in
the file once, and what is written in its place:

    == qsim/control/outliers.py tests/control/test_outliers.py

    The window begins with the second step.
    -        if step >= self.start:
    +        if step > self.start:

Without tests, they are those of the folder in `tests/` that mirrors the file's. The examples of the file's own docstrings count, too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: The least part of the faults that tests must see.
WANTED = 0.97
#: What every test imports and no fault changes: imported once, before the processes that test are forked.
_SHARED = ("torch", "torch._inductor.config", "torch._dynamo", "numba", "scipy.stats", "hypothesis", "pytest", "_pytest.doctest")
_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "_build", "_drawn", "*.egg-info")


class Fault(NamedTuple):
    """A change of one place in one file that tests must see.

    Attributes:
        meaning: What is wrong then.
        file: The file, from the root.
        before: What stands in it, once.
        after: What is written instead.
        tests: Arguments of pytest for the tests that concern it.
    """

    meaning: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def planted(self, root: Path) -> str:
        """The text of the file with the fault; an error if the table does not fit the file."""
        text = (root / self.file).read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file}: {self.before!r} occurs {text.count(self.before)} times, and must occur once: {self.meaning}")
        return text.replace(self.before, self.after)


def faults() -> list[Fault]:
    """All faults of the tables."""
    return [fault for table in sorted((ROOT / "tests" / "mutants").glob("*.txt")) for fault in _read(table.read_text())]


def _read(table: str) -> Iterator[Fault]:
    for section in re.split(r"^== ", table, flags=re.MULTILINE)[1:]:
        heading, *paragraphs = re.split(r"\n\n+", section.strip())
        file, *tests = heading.split(maxsplit=1)
        own = [file] if file.startswith("qsim/") else []
        for paragraph in paragraphs:
            lines = paragraph.split("\n")
            before, after = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
            meaning = " ".join(line for line in lines if line[0] not in "-+")
            yield Fault(meaning, file, before, after, (*(tests[0].split() if tests else [_mirror(file)]), *own))


def _mirror(file: str) -> str:
    """The folder of tests for a file's folder, or for the nearest above it that has one."""
    room = Path(file.removeprefix("kernels/").replace("qsim_kernels", "kernels")).parent
    parts = room.parts[room.parts[0] == "qsim" :]
    return next(str(path) for n in range(len(parts), -1, -1) if (ROOT / (path := Path("tests", *parts[:n]))).is_dir())


class _Run(NamedTuple):
    """A process that tests one fault, or the sources without any."""

    fault: Fault | None
    process: BaseProcess
    tree: Path
    output: Path
    started: float


def _test(tree: Path, output: Path, arguments: Sequence[str]) -> None:
    """The process that tests: in a session of its own, so that it ends with the processes that tests start."""
    os.setsid()
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    paths = [str(tree), str(tree / "kernels"), str(tree / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path[:0] = paths
    import pytest

    code = pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(int(code))


def _start(fault: Fault | None, tests: Sequence[str], tree: Path, output: Path) -> _Run:
    if fault is not None:
        (tree / fault.file).write_text(fault.planted(ROOT))
    process = multiprocessing.get_context("fork").Process(target=_test, args=(tree, output, tests))
    process.start()
    return _Run(fault, process, tree, output, time.monotonic())


def _end(run: _Run, limit: float) -> str | None:
    """The test that failed first, nothing if all passed; None while the process goes on."""
    is_late = time.monotonic() - run.started > limit
    if run.process.is_alive() and not is_late:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.process.pid or 0, signal.SIGKILL)
    run.process.join()
    if run.fault is not None:
        shutil.copy2(ROOT / run.fault.file, run.tree / run.fault.file)
    return f"no end within {limit:.0f} s" if is_late else _failed(run)


def _failed(run: _Run) -> str:
    text, code = run.output.read_text(errors="replace"), run.process.exitcode
    if code == 0:
        return ""
    if code is not None and code < 0:
        return f"a crash, {signal.Signals(-code).name}"
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    if code in (1, 2) and first:
        return first[1]
    raise RuntimeError(f"pytest ended with {code}, and no test failed; planted: {run.fault}\n{text[-3000:]}")


def outcomes(planted: Sequence[Fault], workers: int, limit: float) -> Iterator[tuple[Fault, str, float]]:
    """Plant faults; give each with the test that saw it, or nothing, and the seconds that this took, in the order in which they end.

    Raises:
        RuntimeError: If a test of theirs fails without a fault: what it sees says nothing.
    """
    for name in _SHARED:
        importlib.import_module(name)
    tests = sorted({path for fault in planted for path in fault.tests})
    without = [(None, own) for own in (tests[number::workers] for number in range(workers)) if own]
    waiting, names = iter([*without, *((fault, fault.tests) for fault in planted)]), itertools.count()
    with tempfile.TemporaryDirectory(prefix="qsim-mutants-") as folder:
        os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        free = [Path(shutil.copytree(ROOT, f"{folder}/tree{n}", ignore=_NOT_COPIED)) for n in range(workers)]
        running: list[_Run] = []
        while True:
            while free and (job := next(waiting, None)):
                running.append(_start(*job, free.pop(), Path(folder, f"{next(names)}.out")))
            if not running:
                return
            wait([run.process.sentinel for run in running], timeout=1.0)
            for run in list(running):
                failed = _end(run, limit if run.fault is not None else math.inf)
                if failed is None:
                    continue
                running.remove(run)
                free.append(run.tree)
                if run.fault is not None:
                    yield run.fault, failed, time.monotonic() - run.started
                elif failed:
                    raise RuntimeError(f"{failed} fails without a fault")


def main() -> None:
    """Plant the faults of the tables, print what became of each, and fail if tests see less than 97 % of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("words", nargs="*", help="plant only faults whose file or meaning has one of these words")
    parser.add_argument("-n", "--workers", type=int, default=os.cpu_count() or 1, help="faults tested at a time (default: one per core)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the tests of one fault (default 300)")
    given = parser.parse_args()
    chosen = [fault for fault in faults() if not given.words or any(word in f"{fault.file} {fault.meaning}" for word in given.words)]
    survived, started = [], time.monotonic()
    for number, (fault, seen, seconds) in enumerate(outcomes(chosen, given.workers, given.limit), start=1):
        print(f"{number:4}/{len(chosen)} {seconds:4.0f} s  {fault.file}: {fault.meaning}\n      {seen or 'SURVIVED'}", flush=True)
        survived += [] if seen else [fault]
    share = 1 - len(survived) / max(len(chosen), 1)
    print(f"\n{len(chosen) - len(survived)} of {len(chosen)} faults seen, {share:.1%}, in {time.monotonic() - started:.0f} s; no test saw:")
    print("\n".join(f"  {fault.file}: {fault.meaning}" for fault in survived) or "  none")
    sys.exit(share < WANTED)


if __name__ == "__main__":
    main()
