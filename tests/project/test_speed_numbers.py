"""The figures of speed in README are those of the tables in Speed.

Each sentence is compared with cells of a table: a number with its cell, a range with the lowest and the highest of its cells. A row that is
added to a table counts, so a sentence that it makes false fails here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/speed.md")}

#: Where figures of speed are given: a page, and what the text begins and ends with.
PLACES = [("README.md", "## Four figures", "\n## ")]

#: A figure of speed.
FIGURE = r"\S+ (?:%|×|ms\b|times as long)"


def tables(heading: str) -> list[list[list[str]]]:
    """The cells of the tables of Speed between a heading and the next; the first row of each is its header."""
    section = PAGES["docs/speed.md"].partition(f"\n{heading}\n")[2]
    lines = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"(?:^\|.*\n)+", lines, flags=re.MULTILINE)
    rows = [[row for row in table.splitlines() if set(row) - set("|-: ")] for table in found]
    return [[[text.strip() for text in row.strip("|").split("|")] for row in table] for table in rows]


def cell(table: list[list[str]], row: str, column: int) -> str:
    """The number in the one row whose first cells begin with some words."""
    (found,) = [cells for cells in table[1:] if " | ".join(cells).startswith(row)]
    return numbers(found[column])[0]


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text)


def span(cells: list[str]) -> tuple[str, str]:
    """The lowest and the highest number."""
    found = sorted((number for text in cells for number in numbers(text)), key=float)
    return found[0], found[-1]


def bandwidth() -> tuple[str, ...]:
    """The lowest share of a copy's bandwidth, of round-to-nearest and stochastic rounding."""
    (table,) = tables("## Rounding")
    assert table[0][1:3] == ["nearest", "stochastic"]
    return span([text for row in table[1:] for text in row[1:3]])[:1]


def gpt_medium() -> tuple[str, ...]:
    """Steps with five points in E4M3, nearest and stochastic."""
    as_one = tables("## Training")[0]
    return cell(as_one, "five in E4M3, rounded to nearest", 1), cell(as_one, "five in E4M3, stochastic", 1)


def on_the_chip() -> tuple[str, ...]:
    """A step with five points in E4M3, multiplied by the chip."""
    return (cell(tables("## Training")[2], "five in E4M3, multiplied", 1),)


def adamw() -> tuple[str, ...]:
    """A step of qsim, torchao and torch."""
    table = tables("## Optimizers")[0]
    column = table[0].index("288 tensors")
    return tuple(cell(table, row, column) for row in ("AdamW, stochastic | bf16 |", "torchao", "torch's fused AdamW"))


def on_a_cpu() -> tuple[str, ...]:
    """The range of a step of a GPT on a CPU."""
    table = tables("## On a CPU")[0]
    (found,) = [row[2] for row in table if row[0].startswith("training step of a small GPT")]
    return span([found])


def small_layers() -> tuple[str, ...]:
    """The range of a small layer called from Python, in all recipes and on both hosts, and that of compiled ones in CUDA graphs."""
    called, compiled = tables("### Small layers")
    assert (called[0][2], compiled[0][3]) == ("on another host", '`mode="reduce-overhead"`')
    return (*span([text for row in called[1:] for text in row[1:3]]), *span([row[3] for row in compiled[2:]]))


@dataclass(frozen=True)
class Sentence:
    """A sentence with figures, and how to read them from the tables."""

    page: str
    pattern: str
    measured: Callable[[], tuple[str, ...]]


SENTENCES = [
    Sentence("README.md", r"^\| rounding on an H200.*?\| (\S+) % of its bandwidth", bandwidth),
    Sentence("README.md", r"^\| training step of GPT-2 medium.*?\| (\S+) and (\S+) × its time", gpt_medium),
    Sentence("README.md", r"^\| AdamW with stochastic rounding, 288 tensors \| (\S+) ms \| torchao (\S+) ms; torch's.*? (\S+) ms", adamw),
    Sentence("README.md", r"^\| training step of a small GPT on two CPU cores.*?\| (\S+) to (\S+) × its time", on_a_cpu),
    Sentence("README.md", r"^Small layers called from Python take (\S+) to (\S+) times.*\n(\S+) to (\S+) times as long", small_layers),
    Sentence("README.md", r"a training step of a\scompiled GPT-2 medium then takes\s(\S+) × as long", on_the_chip),
]


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.measured.__name__)
def test_figures_are_those_of_the_tables(sentence: Sentence) -> None:
    said = re.search(sentence.pattern, PAGES[sentence.page], flags=re.MULTILINE)
    assert said is not None
    assert said.groups() == sentence.measured(), f"{sentence.page}: {said[0]}"


@pytest.mark.parametrize(("page", "start", "end"), PLACES)
def test_every_figure_of_speed_is_in_a_sentence_that_is_compared(page: str, start: str, end: str) -> None:
    text = PAGES[page].partition(start)[2].partition(end)[0]
    assert re.search(FIGURE, text)
    for sentence in SENTENCES:
        text = re.sub(sentence.pattern, "", text, flags=re.MULTILINE)
    assert re.findall(FIGURE, text) == []


def test_the_table_at_the_top_of_speed_has_numbers_of_the_tables_below() -> None:
    top = re.findall(r"^\| (.+) \| (.+) \| \[(.+)\]\(#.+\) \|$", PAGES["docs/speed.md"].partition("\n## ")[0], flags=re.MULTILINE)
    assert len(top) == 6
    for work, text, section in top:
        below = {number for table in tables(f"## {section}") for row in table for cells in row for number in numbers(cells)}
        assert numbers(text), work
        assert set(numbers(text)) <= below, work
