"""Previews of pages on other sites: title, first paragraph, and a picture, in Open Graph's tags.

The picture has an address only if the site has one, `html_baseurl`.
"""

from __future__ import annotations

import html
import itertools
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from qsim import formats

_PICTURE = "_static/card.png"
_LONGEST = 200


def tags(title: str, description: str, site: str, address: str) -> str:
    """The tags of a page; `site` is empty for one without an address."""
    properties = {"og:type": "article", "og:site_name": "qsim", "og:title": title, "og:description": description}
    if site:
        picture = {"og:image": site + _PICTURE, "og:image:width": "1200", "og:image:height": "630", "og:image:alt": "E2M1's staircase"}
        properties |= {"og:url": site + address, **picture}
    lines = [f'<meta property="{name}" content="{html.escape(value)}" />' for name, value in properties.items()]
    if site:
        lines.append('<meta name="twitter:card" content="summary_large_image" />')
    return "\n".join([f'<meta name="description" content="{html.escape(description)}" />', *lines]) + "\n"


def description(tree: nodes.document) -> str:
    """The first paragraph of a page."""
    paragraph = next((node for node in tree.findall(nodes.paragraph) if len(node.astext()) > 40), None)
    text = " ".join(paragraph.astext().split()) if paragraph is not None else "Low-precision arithmetic, emulated in PyTorch"
    return text if len(text) <= _LONGEST else text[:_LONGEST].rpartition(" ")[0].rstrip(",;:.") + " …"


def add_tags(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Put the tags into a page."""
    if tree is not None:
        title = context["title"] if page != app.config.root_doc else "qsim: low-precision arithmetic, emulated in PyTorch"
        context["metatags"] += tags(nodes.unescape(title), description(tree), app.config.html_baseurl, f"{page}.html")


def draw(target: Path) -> None:
    """Draw the picture: FP4's staircase next to the name."""
    from matplotlib.figure import Figure

    ink, paper = "#0b62a8", "#f5f9fd"
    figure = Figure(figsize=(12, 6.3), dpi=100, facecolor=paper)
    figure.text(0.06, 0.56, "qsim", size=110, weight="bold", color=ink)
    figure.text(0.06, 0.40, "Low-precision arithmetic,\nemulated in PyTorch", size=30, color="#333333", va="center", linespacing=1.4)
    figure.text(0.06, 0.16, "any format · any rounding · reproducible to the bit", size=18, color="#555555")
    axes = figure.add_axes((0.6, 0.1, 0.36, 0.8), facecolor="none")
    values = [value for value in formats.E2M1.values() if value >= 0]
    ends = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(values)), 6.5]
    axes.plot([0, 6.5], [0, 6.5], color="#9bbfdf", linewidth=2)
    axes.hlines(values, ends[:-1], ends[1:], color=ink, linewidth=6)
    axes.plot(values, values, "o", color=ink, markersize=9)
    axes.axis("off")
    figure.savefig(target)


def write(app: Sphinx, error: Exception | None) -> None:
    """Put the picture into the site."""
    if error is None and app.builder.format == "html":
        draw(Path(app.outdir) / _PICTURE)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.connect("html-page-context", add_tags)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
