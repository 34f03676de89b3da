"""The directive `studies`: a table of all studies that the command line knows, with links to the reports that there are."""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from qsim import studies


class Studies(SphinxDirective):
    """A table of studies."""

    def run(self) -> list[nodes.Node]:
        """The table."""
        group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (20, 45, 35)), cols=3)
        group += nodes.thead("", _row([nodes.Text(title) for title in ("study", "what it asks", "of which paper")]))
        body = nodes.tbody()
        for name in studies.names():
            study = studies.named(name)
            body += _row([self._named(name), nodes.Text(study.question), nodes.Text(study.source)])
        group += body
        return [nodes.table("", group)]

    def _named(self, name: str) -> nodes.Node:
        """A study's name, which leads to its report if there is one."""
        shown = nodes.literal(name, name)
        if not (Path(self.env.srcdir) / "studies" / name / "report.md").exists():
            return shown
        link = pending_xref(
            "", shown, refdomain="std", reftype="doc", reftarget=f"/studies/{name}/report", refexplicit=True, refdoc=self.env.docname
        )
        link["refwarn"] = True
        return link


def _row(cells: list[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.add_directive("studies", Studies)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
