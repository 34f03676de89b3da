"""Outputs of examples, as files that the site shows: `docs/_printed/monitor.txt` is the output of `examples/monitor.py`.

A file's first line is a checksum of the example. `python docs/_ext/outputs.py monitor.py` writes the file again. Columns of seconds are
left out: they say more about the machine than about the example.

`tests/support/running_examples.py` compares the files with what the examples print in the tests, apart from numbers.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES, PRINTED = ROOT / "examples", ROOT / "docs" / "_printed"
ARGUMENTS = {"monitor.py": ["figures"]}


def written(name: str) -> Path:
    """The file with the output of an example."""
    return PRINTED / f"{Path(name).stem}.txt"


def is_current(name: str) -> bool:
    """Whether the file was written by this example, as it is now."""
    return written(name).exists() and written(name).read_text(encoding="utf-8").partition("\n")[0] == checksum(name)


def output(name: str) -> str:
    """The output of an example: from its file if that is current, otherwise from a new run."""
    return written(name).read_text(encoding="utf-8").partition("\n")[2] if is_current(name) else run(name)


def checksum(name: str) -> str:
    """A checksum of an example. The library is not part of it: the tests run the examples."""
    return hashlib.sha256((EXAMPLES / name).read_bytes()).hexdigest()


def run(name: str) -> str:
    """Run an example in a process and a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXAMPLES / name), *ARGUMENTS.get(name, [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    return without_seconds(done.stdout.strip()) + "\n"


def without_seconds(text: str) -> str:
    """A text without the last column of tables that end in seconds."""
    kept, is_timed = [], False
    for line in text.splitlines():
        is_timed = line.endswith(" seconds") or (is_timed and bool(line.strip()))
        kept.append(line.rpartition(" ")[0].rstrip() if is_timed else line)
    return "\n".join(kept)


if __name__ == "__main__":
    PRINTED.mkdir(exist_ok=True)
    for example in sys.argv[1:]:
        written(example).write_text(f"{checksum(example)}\n{run(example)}", encoding="utf-8")
