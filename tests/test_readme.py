"""README's code prints what README says, its numbers are those of the site, and its links lead somewhere."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

import qsim

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
CODE = [text for language, text in FENCES if language == "python"]
TEXTS = [text for language, text in FENCES if language == "text"]


def section(title: str) -> str:
    """What stands below a heading."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_every_code_is_followed_by_what_it_prints() -> None:
    assert CODE
    assert [language for language, _ in FENCES if language in ("python", "text")] == ["python", "text"] * len(CODE)
    assert {language for language, _ in FENCES} <= {"python", "text", "sh", "bibtex"}, "nothing runs code in another language"


@pytest.mark.parametrize(("code", "text"), list(zip(CODE, TEXTS, strict=False)))
def test_code_prints_what_is_said(code: str, text: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng(devices=[]):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == text


def test_the_numbers_of_the_speed_table_are_those_of_the_sites_tables() -> None:
    rows = [line for line in section("Speed").splitlines() if line.startswith("|")][2:]
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    held = set(re.findall(r"\d+(?:\.\d+)*", page))
    shown = [number for row in rows for number in re.findall(r"\d+(?:\.\d+)+", row)]
    assert len(shown) > 30
    assert [number for number in shown if number not in held] == []


def test_commands_of_the_speed_table_are_measurements_that_there_are() -> None:
    commands = re.findall(r"\| `(\w+)[^`]*` \|$", section("Speed"), flags=re.MULTILINE)
    assert len(commands) > 8
    assert [name for name in commands if not (ROOT / "qsim" / "bench" / f"{name}.py").exists()] == []


def test_tables_have_as_many_cells_in_each_row() -> None:
    for title in ("Speed", "Beside other packages"):
        rows = [line for line in section(title).splitlines() if line.startswith("|")]
        assert len(rows) > 10
        assert {row.count("|") for row in rows} == {rows[0].count("|")}, title


def test_what_is_linked_or_shown_is_there() -> None:
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
