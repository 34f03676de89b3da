"""Pictures are loaded when they come near the window, and have their sizes, so that nothing moves when they arrive.

A figure that exists for light and for dark pages is loaded in the form that is shown.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.images import get_image_size


def complete(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Add what a browser needs to know before it has the picture."""
    for image in doctree.findall(nodes.image):
        image["loading"] = "lazy"
        size = get_image_size(Path(app.srcdir) / image["uri"])
        if size is not None and "width" not in image:
            image["width"], image["height"] = map(str, size)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.connect("doctree-resolved", complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
