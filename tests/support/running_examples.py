"""Run an example as a user would, but in this process: starting another one takes longer than most examples."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch import distributed, multiprocessing

from support.ranks import CAP, IMPORTED

FOLDER = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(FOLDER.parent / "docs" / "_ext"))

import outputs  # noqa: E402 (from the folder above)


class RunExample(Protocol):
    def __call__(self, name: str, *arguments: object, **constants: object) -> str: ...


@pytest.fixture(name="run")
def running(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[RunExample]:
    """Return the output of an example, or of one whose constants are others. Its settings are undone afterwards."""

    def run(name: str, *arguments: object, **constants: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        if constants:
            monkeypatch.syspath_prepend(FOLDER)
            module = importlib.import_module(name.removesuffix(".py"))
            for constant, value in constants.items():
                monkeypatch.setattr(module, constant, value)
            module.main()
        else:
            runpy.run_path(str(FOLDER / name), run_name="__main__")
        printed = capsys.readouterr().out
        check_what_the_gallery_shows(name, printed)
        return printed

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


def run_in_ranks(name: str, arguments: list[str], ranks: int) -> None:
    """Run an example in several processes, with the environment and the store that torchrun gives them, but without its imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [context.Process(target=_run_rank, args=(rank, ranks, store.port, name, arguments), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(CAP)
    assert [process.exitcode for process in processes] == [0] * ranks


def _run_rank(rank: int, ranks: int, port: int, name: str, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test"}
    torch.set_num_threads(1)
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def check_what_the_gallery_shows(name: str, printed: str) -> None:
    """The site's gallery shows what an example prints: the same words and as many numbers, which may be others."""
    shown = outputs.written(name)
    if shown.exists():
        assert words(shown.read_text(encoding="utf-8").partition("\n")[2]) == words(outputs.without_seconds(printed)), name


def words(text: str) -> list[str]:
    """The words of a text, without folders and with a sign for every number, also for one that is only bounded, as `<0.01`."""
    return re.sub(r"<?[-+]?\d[\d.]*(e[-+]?\d+)?", "#", re.sub(r"\S*/", "", text)).split()


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
