"""The directive `studies`: a table of all reports, with the question and the answer of each, in the order of the command line's list."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from qsim import studies

STUDIES = Path(__file__).parents[1] / "studies"
HEADER = ("study", "question", "answer")


class Studies(SphinxDirective):
    """A table of reports."""

    def run(self) -> list[nodes.Node]:
        """The table."""
        group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (20, 32, 48)), cols=len(HEADER))
        group += nodes.thead("", _row([nodes.Text(title) for title in HEADER]))
        body = nodes.tbody()
        for name, question, answer in answers():
            body += _row([self._link(name), nodes.Text(question), nodes.Text(answer)])
        group += body
        return [nodes.table("", group, classes=["stacked"])]

    def _link(self, name: str) -> nodes.Node:
        """A report's name, which leads to it."""
        shown = nodes.literal(name, name)
        link = pending_xref(
            "", shown, refdomain="std", reftype="doc", reftarget=f"/studies/{name}/report", refexplicit=True, refdoc=self.env.docname
        )
        link["refwarn"] = True
        return link


def answers() -> list[tuple[str, str, str]]:
    """For each report its folder, the question and the first sentence of the answer; those of one study follow one another."""
    reports = {page.parent.name: page.read_text(encoding="utf-8") for page in sorted(STUDIES.glob("*/report.md"))}
    found = []
    for study in studies.names():
        own = [name for name, text in reports.items() if f"\nStudy `{study}`." in text]
        for name in sorted(own, key=lambda name: (name != study, name)):
            (title, answer), (first, _) = (_opening(reports[report]) for report in (name, study))
            question = studies.named(study).question
            # The title of a report on another model begins with the question, or with the title of the study's own report.
            other_model = next((title.removeprefix(start).lstrip(". ") for start in (question, first) if title.startswith(start)), "")
            found.append((name, other_model or question, re.split(r"(?<=\.) (?=[A-Z])", answer)[0]))
    return found


def _opening(report: str) -> tuple[str, str]:
    """The title and the answer of a report."""
    ((title, answer),) = re.findall(r"\A# (.+)\n\n\*\*(.+)\*\*\n", report)
    return title, answer


def _row(cells: list[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.add_directive("studies", Studies)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
