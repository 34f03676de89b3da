"""Run an example as a user would, but in this process: starting another one takes longer than most examples."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"


class Run(Protocol):
    def __call__(self, name: str, *arguments: object) -> str: ...


@pytest.fixture(name="run")
def running(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Return the output of an example. Its settings are undone afterwards."""

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


def table(printed: str, heading: str) -> dict[str, list[float]]:
    """The rows of numbers below a heading up to the next empty line, by their names; without units."""
    lines = printed.splitlines()
    begin = next(i for i, line in enumerate(lines) if heading in line) + 1
    end = next((i for i in range(begin, len(lines)) if not lines[i].strip()), len(lines))
    rows = {}
    for line in lines[begin:end]:
        name, *cells = (cell for cell in line.strip().split("  ") if cell.strip())
        rows[name.strip()] = [float(cell.strip().removesuffix("dB").removesuffix("%")) for cell in cells]
    return rows
