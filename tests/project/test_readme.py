"""The README's code prints the output shown, its commands exist, and its links work."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

import qsim

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
CODE = [text for language, text in FENCES if language == "python"]
TEXTS = [text for language, text in FENCES if language == "text"]


def section(title: str) -> str:
    """The text below a heading."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_every_code_is_followed_by_what_it_prints() -> None:
    assert CODE
    assert [language for language, _ in FENCES if language in ("python", "text")] == ["python", "text"] * len(CODE)
    assert {language for language, _ in FENCES} <= {"python", "text", "sh", "diff", "bibtex"}, "nothing runs code in another language"


@pytest.mark.parametrize(("code", "text"), list(zip(CODE, TEXTS, strict=False)))
def test_code_prints_what_is_said(code: str, text: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng(devices=[]):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == text


def test_commands_of_the_figures_are_measurements_that_there_are() -> None:
    commands = re.findall(r"\| `(\w+)[^`]*` \|$", section("Four figures"), flags=re.MULTILINE)
    assert len(commands) == 4
    assert [name for name in commands if not (ROOT / "qsim" / "cli" / "bench" / f"{name}.py").exists()] == []


COMPARISON = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("table", [section("Four figures"), section("Compared with other packages"), COMPARISON])
def test_tables_have_as_many_cells_in_each_row(table: str) -> None:
    assert len(rows(table)) > 5
    assert {row.count("|") for row in rows(table)} == {rows(table)[0].count("|")}


def test_the_comparison_is_the_full_tables() -> None:
    """Every mark of the short table is that of the long one, which may say more."""
    long = {cells[1].strip(): cells[2:] for row in rows(COMPARISON) if (cells := row.split("|"))}
    for row in rows(section("Compared with other packages"))[2:]:
        _, name, *marks, _ = row.split("|")
        assert [mark.strip() for mark in marks] == [mark.strip()[:1] for mark in long[name.strip()][: len(marks)]], name


def test_linked_files_and_pictures_exist() -> None:
    linked = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", README)
    targets = [a or b for a, b in linked]
    assert len(targets) > 20
    for target in targets:
        path, _, place = target.partition("#")
        assert (ROOT / path).exists(), target
        if place:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert place in [heading.lower().replace(" ", "-") for heading in headings], target


def test_the_citation_is_of_this_version_and_license() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {qsim.__version__}\n" in citation
    assert f"version = {{{qsim.__version__}}}" in section("Cite")
    assert "\nlicense: BSD-3-Clause\n" in citation
