"""The directive `printed`: what an example prints.

    ```{printed} monitor.py
    ```

shows the file that `outputs.py` keeps for the example. If the example has changed since, the build runs it again and shows its new output.
"""

from __future__ import annotations

import outputs
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Printed(SphinxDirective):
    """The output of an example."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A block of text."""
        name = self.arguments[0]
        for path in (outputs.EXAMPLES / name, outputs.written(name)):
            self.env.note_dependency(str(path))
        text = outputs.output(name)
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx's entry point."""
    app.add_directive("printed", Printed)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
