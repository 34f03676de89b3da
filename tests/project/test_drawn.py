"""Figures of the site: committed ones are current, and the build redraws a figure only if its script or theme has changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sphinx")
pytest.importorskip("docutils")
pytest.importorskip("matplotlib")
DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import drawn  # noqa: E402 (from the folder above)

#: A script that records its number of threads each time it draws.
SCRIPT = """
READS = ("page.md",)
import matplotlib.pyplot as plt
import torch


def draw():
    with open({log!r}, "a") as log:
        print(torch.get_num_threads(), file=log)
    figure, axes = plt.subplots(figsize=(1, 1))
    axes.plot([1, 2])
    return figure
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A site with one figure, `line`."""
    for folder in ("figures", "_static"):
        (tmp_path / folder).mkdir()
    (tmp_path / "figures" / "line.py").write_text(SCRIPT.format(log=str(tmp_path / "log")))
    (tmp_path / "page.md").write_text("1")
    return tmp_path


def times_drawn(source: Path) -> int:
    return len((source / "log").read_text().split())


@pytest.mark.parametrize("file", sorted((DOCS / "_static").glob("*.svg")), ids=lambda file: file.name)
def test_committed_figures_are_current(file: Path) -> None:
    name, theme = file.stem.rsplit("-", 1)
    assert drawn.is_current(file, drawn.script_of(DOCS, name), theme), f"run: python docs/_ext/drawn.py {name} docs/_static"


def test_a_figure_is_drawn_once(source: Path) -> None:
    assert drawn.current(source, "line", "light") == drawn.current(source, "line", "light") == source / "_drawn" / "line-light.svg"
    assert times_drawn(source) == 1
    drawn.current(source, "line", "dark")
    assert times_drawn(source) == 2


def test_a_committed_figure_is_taken(source: Path) -> None:
    committed = source / "_static" / "line-light.svg"
    drawn.draw(source / "figures" / "line.py", committed, "light")
    assert drawn.current(source, "line", "light") == committed
    assert times_drawn(source) == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("folder", ["_static", "_drawn"])
@pytest.mark.parametrize("change", ["script", "data", "read", "theme", "no record"])
def test_a_stale_figure_is_drawn_again(source: Path, folder: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, stale = source / "figures" / "line.py", source / folder / "line-light.svg"
    drawn.draw(script, stale, "light")
    if change == "script":
        script.write_text(script.read_text().replace("[1, 2]", "[1, 3]"))
    elif change == "data":
        script.with_suffix(".json").write_text("[1, 3]")
    elif change == "read":
        (source / "page.md").write_text("2")
    elif change == "theme":
        monkeypatch.setitem(drawn.THEMES, "light", ("#000000", *drawn.THEMES["light"][1:]))
    else:
        stale.write_text("<svg/>")
    assert not drawn.is_current(stale, script, "light")
    found = drawn.current(source, "line", "light")
    assert found == source / "_drawn" / "line-light.svg", "what is committed is not overwritten"
    assert times_drawn(source) == 2
    assert drawn.is_current(found, script, "light")


def test_figures_are_drawn_with_one_thread(source: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        drawn.current(source, "line", "light")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert (source / "log").read_text() == "1\n"
