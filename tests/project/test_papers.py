"""The page on the papers has a row for every numbered item of each, and its rows have results or say why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "papers.md").read_text(encoding="utf-8")

#: How many items of each kind a paper has: numbers up to this one, or letters.
FEWER_BITS: dict[str, int | str] = {
    "Definition": 5,
    "Algorithm": 2,
    "Assumption": 2,
    "Lemma": 3,
    "Theorem": 1,
    "Figure": 6,
    "Table": 3,
    "Appendix": "H",
}
LLM_TRAINING: dict[str, int | str] = {
    "Equation": 2,
    "Proposition": 1,
    "Algorithm": 1,
    "Lemma": 4,
    "Theorem": 3,
    "Corollary": 1,
    "Figure": 4,
    "Table": 8,
    "Appendix": "C",
}
BFLOAT16: dict[str, int | str] = {"Algorithm": 5, "Theorem": 2, "Figure": 8, "Table": 11, "Appendix": "D"}
PAPERS = {
    "Training with Fewer Bits": FEWER_BITS,
    "Stochastic Rounding for LLM Training": LLM_TRAINING,
    "Revisiting BFloat16 Training": BFLOAT16,
}
_ITEM = re.compile(r"\b([A-Z][a-z]+?)s? ([A-H]|\d+)[ab]?(?:\.\d)?(?: (and|to) ([A-H]|\d+))?\b")


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")][1:]


def items(cell: str) -> set[tuple[str, str]]:
    """The items that a first cell names: `Figures 3 and 4` are two, `Tables 5 to 11` are seven."""
    found = set()
    for kind, first, link, last in _ITEM.findall(cell.replace("Appendices", "Appendixs")):
        many = range(_order(first), _order(last or first) + 1) if link == "to" else [_order(first), _order(last or first)]
        found |= {(kind, str(number)) for number in many}
    return found


def _order(number: str) -> int:
    return int(number) if number.isdecimal() else ord(number) - ord("A") + 1


def due(counts: dict[str, int | str]) -> set[tuple[str, str]]:
    return {(kind, str(number)) for kind, last in counts.items() for number in range(1, _order(str(last)) + 1)}


@pytest.mark.parametrize("title", PAPERS)
def test_every_numbered_item_of_a_paper_has_a_row(title: str) -> None:
    named = set().union(*(items(row[0]) for row in rows(title)))
    assert due(PAPERS[title]) - named == set()


@pytest.mark.parametrize("title", PAPERS)
def test_rows_say_what_there_is_or_why_there_is_nothing(title: str) -> None:
    found = rows(title)
    assert {len(row) for row in found} == {3}
    assert all(row[0] and (row[1] or row[2]) for row in found)
    assert [row[0] for row in found if row[1].startswith("not reproduced") and ": " not in row[1]] == []
