"""The page on the papers has a row for every numbered item of each, and its rows have the results of the reports or say why not."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "papers.md").read_text(encoding="utf-8")

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


def graded(title: str) -> list[tuple[str, str, str]]:
    """Study, place and verdict of every claim of a paper that the reports grade."""
    found = []
    for report in sorted(DOCS.glob("studies/*/report.md")):
        text = report.read_text(encoding="utf-8")
        name, source = re.findall(r"^Study `(.+)`. Source: (.+)$", text, re.MULTILINE)[0]
        for row in text.partition("\n## Verdicts\n")[2].partition("\n## ")[0].splitlines()[3:]:
            if not row.startswith("|"):
                continue
            numbered, *_, verdict = (cell.strip().removesuffix(" (expected)") for cell in re.split(r"(?<!\\)\|", row)[1:-1])
            where = numbered.partition(". ")[2]
            # A place in another paper than the study's begins with that paper's name.
            paper, _, place = where.rpartition(", ") if where.count(", ") > 1 else ("", "", where)
            if title in (paper or source) and _ITEM.match(place):
                found.append((name, place, verdict))
    return found


def row_of(title: str, study: str, place: str) -> int:
    """The row for a place: of those that name the study, the one that begins with the place, or else names its first item."""
    own = [(number, row[0]) for number, row in enumerate(rows(title)) if re.search(rf"`{study}`", row[1] + row[2])]
    first = place.partition(",")[0]
    exact = [number for number, item in own if re.match(rf"{re.escape(place)}\b(?!\.)", item)]
    near = [number for number, item in own if re.search(rf"\b{re.escape(first)}\b(?!\.\d)", item.partition(":")[0])]
    assert exact or near, f"{title}: no row for {place}, which the study {study} grades"
    return (exact or near)[0]


@pytest.mark.parametrize("title", PAPERS)
def test_rows_give_the_verdicts_of_the_reports(title: str) -> None:
    """All of them, and no others."""
    found: dict[int, set[str]] = {}
    for study, place, verdict in graded(title):
        found.setdefault(row_of(title, study, place), set()).add(verdict)
    assert len(found) > 5
    for number, verdicts in found.items():
        row = rows(title)[number]
        assert set(re.findall(r"\b(yes|no|undecided)\b", row[2])) == verdicts, row[0]


#: The words of verdicts in reports, in the order of the table's columns.
VERDICTS = ("yes", "no", "undecided", "yes (expected)")


def test_verdicts_at_the_top_are_those_of_the_reports() -> None:
    """Answers that were known before any run are not counted as results."""
    counted = {title: Counter[str]() for title in PAPERS}
    for report in (DOCS / "studies").glob("*/report.md"):
        text = report.read_text(encoding="utf-8")
        source = re.findall(r"^Study `.+`. Source: (.+)$", text, re.MULTILINE)[0]
        cited = [title for title in PAPERS if title in source and "no claim of a paper" not in source]
        section = text.partition("\n## Verdicts\n")[2].partition("\n## ")[0]
        for title in cited:
            counted[title].update(re.findall(r"\| ([^|]+) \|$", section, flags=re.MULTILINE)[2:])
    assert {verdict for counts in counted.values() for verdict in counts} == set(VERDICTS)
    shown = re.findall(r"^\| \[(.+)\]\(#.+\) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, flags=re.MULTILINE)
    assert [(title, *map(int, counts)) for title, *counts in shown] == [
        (title, *(counts[verdict] for verdict in VERDICTS)) for title, counts in counted.items()
    ]


@pytest.mark.parametrize("report", sorted(DOCS.glob("studies/*/report.md")), ids=lambda report: report.parent.name)
def test_rows_that_reports_call_expected_are_counted_apart(report: Path) -> None:
    rows_of_it = [row for row in report.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d+\. expected \|", row)]
    assert [row for row in rows_of_it if row.endswith("| yes |")] == []
