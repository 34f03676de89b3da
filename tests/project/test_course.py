"""The course: with the solutions every notebook passes its own checks, and without them each exercise fails them."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from support.running_examples import FOLDER

NOTEBOOKS = sorted((FOLDER / "course").glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return found


def tag(cell: dict[str, Any]) -> str:
    tags: list[str] = cell["metadata"].get("tags", [])
    return tags[0] if tags else cell["cell_type"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def solutions(notebook: Path) -> dict[str, Any]:
    path = FOLDER / "course" / "solutions" / f"{notebook.stem}.py"
    names: dict[str, Any] = {}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), names)
    return names


def asked(cell: dict[str, Any]) -> str:
    """The function that an exercise asks for."""
    (name,) = re.findall(r"^def (\w+)\(", source(cell), flags=re.MULTILINE)
    return str(name)


def test_there_are_four() -> None:
    assert [notebook.stem[0] for notebook in NOTEBOOKS] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("notebook", [*NOTEBOOKS, FOLDER / "qsim.ipynb"], ids=lambda notebook: notebook.stem)
def test_notebooks_are_valid_hold_no_outputs_and_fit_a_page(notebook: Path) -> None:
    whole, found = json.loads(notebook.read_text(encoding="utf-8")), cells(notebook)
    # The rules of nbformat 4.5.
    assert set(whole) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
    assert whole["metadata"]["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert len({cell["id"] for cell in found}) == len(found)
    for cell in found:
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert cell["source"], cell["id"]
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        more = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
        assert {name: value for name, value in cell.items() if name not in ("cell_type", "id", "metadata", "source")} == more
        assert cell["cell_type"] == "markdown" or not [line for line in source(cell).splitlines() if len(line) > 85]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_solutions_pass_the_checks(notebook: Path) -> None:
    if notebook.stem.startswith("4"):
        pytest.importorskip("sklearn")
    solved, held, checks = solutions(notebook), dict[str, Any](), 0
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in cells(notebook):
            if tag(cell) == "exercise":
                held[asked(cell)] = solved[asked(cell)]
            elif cell["cell_type"] == "code":
                exec(compile(source(cell), f"{notebook.name}, {cell['id']}", "exec"), held)
                checks += tag(cell) == "check"
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)
    assert checks >= 3
    assert len(printed.getvalue().splitlines()) >= checks


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_exercises_are_open_and_are_checked_right_below(notebook: Path) -> None:
    found = cells(notebook)
    for cell, below in itertools.pairwise(found):
        if tag(cell) == "exercise":
            assert source(cell).endswith("raise NotImplementedError")
            assert tag(below) == "check"
            assert f"{asked(cell)}(" in source(below)
    assert {asked(cell) for cell in found if tag(cell) == "exercise"} <= solutions(notebook).keys()
