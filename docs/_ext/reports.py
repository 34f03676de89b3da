"""Reports of studies on the site: figures for light and dark pages.

A report is plain Markdown, which shows its figures in any viewer. Next to `NAME.svg` is `NAME-dark.svg`; here, each theme shows its own,
and figures without text between them are put next to one another, or below one another where the page is narrow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class Themed(SphinxTransform):
    """Show a figure that exists for both kinds of pages in the one that fits."""

    # Before Sphinx collects the images.
    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Replace paragraphs that consist of such figures."""
        page = Path(self.env.doc2path(self.env.docname))
        for paragraph in list(self.document.findall(nodes.paragraph)):
            images = [child for child in paragraph.children if isinstance(child, nodes.image)]
            others = [child for child in paragraph.children if not isinstance(child, nodes.image) and child.astext().strip()]
            if images and not others and all((page.parent / _dark(image)).exists() for image in images):
                paragraph.replace_self(_figure(images))


def _dark(image: nodes.image) -> str:
    return str(image["uri"]).removesuffix(".svg") + "-dark.svg"


def _figure(images: list[nodes.image]) -> nodes.figure:
    figure = nodes.figure(classes=["drawn", "panels"])
    for image in images:
        for uri, theme in ((image["uri"], "light"), (_dark(image), "dark")):
            figure += nodes.image(uri=uri, alt=image["alt"], classes=[f"only-{theme}"])
    return figure


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.add_transform(Themed)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
