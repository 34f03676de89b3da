"""Tables of prose that become cards on a phone: those with the class `stacked`, claims in reports, and old and new names.

The first cell of a row is the heading of a card. Before each of the others is the heading of its column, which wide pages hide. In all
tables, names such as `qsim.functional.threshold_quantize` break after a dot where a column is too narrow for them.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform


class Stacked(SphinxTransform):
    """Mark the tables of claims, and label the cells of all such tables."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Change all tables of a page."""
        for table in self.document.findall(nodes.table):
            headings, *rows = [[*row.children] for row in table.findall(nodes.row)]
            titles = [heading.astext() for heading in headings]
            if titles[0] in ("where", "before"):
                table["classes"].append("stacked")
            if titles[-1] in ("agrees", "verdict"):
                table["classes"].append("verdicts")
            if "stacked" in table["classes"]:
                for row in rows:
                    for title, cell in list(zip(titles, row, strict=True))[1:]:
                        _label(cell, title)


class Breaks(SphinxPostTransform):
    """Let names in tables break after dots."""

    default_priority = 900
    formats = ("html",)

    def run(self, **_: Any) -> None:
        """Change all tables of a page."""
        for table in self.document.findall(nodes.table):
            for literal in table.findall(nodes.literal):
                for text in [*literal.findall(nodes.Text)]:
                    first, *others = re.split(r"(?<=\w\.)(?=[A-Za-z])", text.astext())
                    parts = [part for other in others for part in (nodes.raw("", "<wbr>", format="html"), nodes.Text(other))]
                    text.parent.replace(text, [nodes.Text(first), *parts])


def _label(cell: nodes.Node, title: str) -> None:
    first = next(iter(cell.findall(nodes.paragraph)), None)
    if title and first is not None and first.astext().strip():
        first.insert(0, nodes.inline("", f"{title}: ", classes=["label"]))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.add_transform(Stacked)
    app.add_post_transform(Breaks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
