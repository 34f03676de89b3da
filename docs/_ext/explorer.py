"""The directive `explorer`: formats and roundings in the reader's browser.

    ```{explorer}
    ```

Its script is the arithmetic that `qsim emit javascript --format any` writes, the names of formats, and the files in `docs/explorer`. It is
one file without imports, so that pages also work when they are opened from a disk.

`python docs/_ext/explorer.py FILE` writes the script.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from qsim import formats
from qsim.silicon import emit

SOURCE = Path(__file__).parents[1] / "explorer"
#: The largest page with its script and style, in bytes.
_LARGEST = 100_000
#: What the script offers to other scripts, and to the browser's console.
_OFFERED = ("format", "quantize", "quantize_blocks", "encode", "decode", "chance")


class Explorer(SphinxDirective):
    """The explorer, or with `small` only a number, a format and the number line."""

    optional_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """A place that the script fills."""
        kind = self.arguments[0] if self.arguments else "whole"
        if kind not in ("whole", "small"):
            raise self.error(f"explorer: the size must be small, or not given, got {kind!r}")
        markup = f'<div class="explorer" data-explorer="{kind}"><noscript>The explorer needs JavaScript.</noscript></div>'
        return [nodes.raw("", markup, format="html")]


def script() -> str:
    """The text of the explorer's script."""
    # The script rounds float64, as JavaScript's numbers are.
    shown = {name: fmt for name, fmt in formats.NAMED.items() if fmt != formats.FP64}
    names = {name: repr(fmt) for fmt in shown.values() for name in formats.names(fmt)}
    emitted = re.sub(r"^export ", "", emit("javascript", "any"), flags=re.MULTILINE)
    named = f"const NAMES = {json.dumps(names)};\nconst SHOWN = {json.dumps(list(shown))};\n"
    own = [(SOURCE / name).read_text(encoding="utf-8") for name in ("formats.js", "numbers.js", "page.js")]
    offered = f"globalThis.qsim = {{ {', '.join(_OFFERED)} }};\n"
    return "\n".join(['"use strict";\n(() => {', emitted, named, *own, offered + "})();\n"])


def write(app: Sphinx, error: Exception | None) -> None:
    """Put script and style into the site."""
    if error is None and app.builder.format == "html":
        static = Path(app.outdir) / "_static"
        (static / "explorer.js").write_text(script(), encoding="utf-8")
        (static / "explorer.css").write_text((SOURCE / "explorer.css").read_text(encoding="utf-8"), encoding="utf-8")
        files = [Path(app.outdir) / "explorer.html", static / "explorer.js", static / "explorer.css"]
        size = sum(file.stat().st_size for file in files if file.exists())
        if size > _LARGEST:
            logging.getLogger(__name__).warning("the explorer's page has %d bytes with its script and style, more than %d", size, _LARGEST)


def add_files(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Pages that show the explorer load its script; others do not."""
    if tree is not None and any("data-explorer" in node.astext() for node in tree.findall(nodes.raw)):
        app.add_css_file("explorer.css")
        app.add_js_file("explorer.js", loading_method="defer")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.add_directive("explorer", Explorer)
    app.connect("html-page-context", add_files)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(script(), encoding="utf-8")
