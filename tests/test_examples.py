"""The examples run as they are, and print what they are there to show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.slow


def run(name: str) -> str:
    """What an example prints."""
    return subprocess.run([sys.executable, FOLDER / name], capture_output=True, text=True, check=True).stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {"first_steps.py", "train_digits.py"}


def test_first_steps() -> None:
    # A sum in BF16 that stops early, and one that arrives.
    sums = dict(re.findall(r"^ +(nearest|stochastic) +(\S+) +\(mean of 256 sums\)$", run("first_steps.py"), flags=re.MULTILINE))
    assert float(sums["nearest"]) == 1
    assert float(sums["stochastic"]) == pytest.approx(3, abs=0.02)


def test_train_digits() -> None:
    rows = re.findall(r"^(.+?) +(\d+\.\d)% +\d+\.\d$", run("train_digits.py"), flags=re.MULTILINE)
    accuracy = {name: float(percent) for name, percent in rows}
    assert list(accuracy) == [
        "float32 everywhere",
        "E4M3 forward, E5M2 gradients",
        "E4M0 backward, to nearest",
        "E4M0 backward, stochastic",
    ]
    # tests/test_training.py says how far these are from what is found.
    native, hybrid, nearest, stochastic = accuracy.values()
    assert min(native, hybrid) > 93
    assert nearest < 30
    assert stochastic > 80
