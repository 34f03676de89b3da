"""The directive `claims`: a table for each report with every claim that it grades, the verdict, the test, the rule and the power.

The papers that qsim is based on come first, then other papers, then questions of the studies.

`python docs/_ext/claims.py` prints the same tables as Markdown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

STUDIES = Path(__file__).parents[1] / "studies"
HEADER = ("verdict", "claim", "test", "rule", "smallest effect")
PAPERS = ("Training with Fewer Bits", "Stochastic Rounding for LLM Training", "Revisiting BFloat16 Training")
#: In place of a test and a rule that the row above has as well.
ABOVE = "as above"


@dataclass(frozen=True)
class Graded:
    """A report, and a row of text for each of its claims.

    Attributes:
        name: The report's folder.
        title: Its heading.
        source: The paper.
        rows: The claims, in the columns of `HEADER`.
    """

    name: str
    title: str
    source: str
    rows: list[tuple[str, ...]]


def graded() -> list[Graded]:
    """All reports. A test compares them with what the code makes of their results."""
    found = [_read(page) for page in sorted(STUDIES.glob("*/report.md"))]
    return sorted(filter(lambda report: report.rows, found), key=lambda report: _place(report.source))


def _place(source: str) -> int:
    """The place of a report: by its paper, of which those that come first are counted first."""
    own = [place for place, paper in enumerate(PAPERS) if paper in source]
    return len(PAPERS) + 1 if source.startswith("no claim of a paper") else min(own, default=len(PAPERS))


class Claims(SphinxDirective):
    """The tables."""

    def run(self) -> list[nodes.Node]:
        """A heading with a link, and a table, for each report."""
        found: list[nodes.Node] = []
        for report in graded():
            link = pending_xref(
                "",
                nodes.inline("", report.title),
                refdomain="std",
                reftype="doc",
                reftarget=f"/studies/{report.name}/report",
                refexplicit=True,
                refdoc=self.env.docname,
            )
            found += [nodes.paragraph("", "", nodes.strong("", "", link), nodes.Text(f" {report.source}")), _table(report)]
        return found


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.add_directive("claims", Claims)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(page: Path) -> Graded:
    text = page.read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    (source,) = re.findall(r"^Study `.+`. Source: (.+)$", text, re.MULTILINE)
    tests = {}
    for cell, test, rule in _cells(text, "How each claim was judged"):
        tests.update(dict.fromkeys(cell.partition(". ")[0].split(", "), (test, rule)))
    rows, before = [], ("", "")
    for cell, claim, _, power, verdict in _cells(text, "Verdicts"):
        number, _, where = cell.partition(". ")
        shown = (ABOVE, ABOVE) if tests[number] == before else tests[number]
        rows.append((verdict, f"{where}: {claim}", *shown, power))
        before = tests[number]
    return Graded(page.parent.name, title, source, rows)


def _cells(text: str, title: str) -> list[list[str]]:
    section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def _table(report: Graded) -> nodes.table:
    group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (9, 33, 24, 24, 10)), cols=len(HEADER))
    group += nodes.thead("", _row(HEADER))
    group += nodes.tbody("", *map(_row, report.rows))
    return nodes.table("", group, classes=["stacked", "claims"])


def _row(cells: tuple[str, ...]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", cell)) for cell in cells))


if __name__ == "__main__":
    for report in graded():
        print(f"\n**{report.title}** {report.source}\n")
        for cells in (HEADER, ("---",) * len(HEADER), *report.rows):
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
