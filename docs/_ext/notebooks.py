"""The notebooks of `examples/` as pages.

    ```{notebook} ../../examples/course/1_rounding_by_hand.ipynb
    ```

becomes the cells of the notebook: text unchanged, because pages are Markdown, too, and code in blocks. The notebooks hold no outputs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from sphinx.application import Sphinx

_NOTEBOOK = re.compile(r"^```\{notebook\} (\S+)\n```$", re.MULTILINE)


def text(notebook: Path, address: str) -> str:
    """A notebook as Markdown, with a link to download it below the first cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    parts = [
        source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```" for cell, source in zip(cells, sources, strict=True)
    ]
    return "\n\n".join([parts[0], f"{{download}}`Download this notebook <{address}>`", *parts[1:]])


def insert(app: Sphinx, page: str, source: list[str]) -> None:
    """Put notebooks into a page."""
    folder = Path(app.env.doc2path(page)).parent
    for address in _NOTEBOOK.findall(source[0]):
        app.env.note_dependency(str(folder / address))
    source[0] = _NOTEBOOK.sub(lambda match: text(folder / match[1], match[1]), source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.connect("source-read", insert)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
