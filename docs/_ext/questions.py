"""The directive `questions`: links to all sections of some pages in the same folder, page by page.

    ```{questions} rounding training
    ```
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from myst_parser.mdit_to_docutils.base import default_slugify
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Questions(SphinxDirective):
    """Lists of links."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, object]] = {}

    def run(self) -> list[nodes.Node]:
        """The title of each page, and a list of its sections."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        lines = []
        for name in self.arguments[0].split():
            page = folder / f"{name}.md"
            self.env.note_dependency(str(page))
            title, questions = sections(page)
            lines += ["", f"**[{title}]({page.name})**", ""]
            lines += [f"- [{question}]({page.name}#{default_slugify(question.replace('`', ''))})" for question in questions]
        held = nodes.Element()
        self.state.nested_parse(StringList(lines, source=str(folder)), self.content_offset, held)
        return held.children


def sections(page: Path) -> tuple[str, list[str]]:
    """The title of a page and those of its sections."""
    text = page.read_text(encoding="utf-8")
    (title,) = re.findall(r"\A# (.+)$", text, re.MULTILINE)
    return title, re.findall(r"^## (.+)$", text, re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.add_directive("questions", Questions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
