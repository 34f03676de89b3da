"""Add roles and labels for screen readers that the theme and Sphinx leave out; warn if the theme no longer has the places for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

#: What every page has, and what it should be.
_THEME = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages of the site">',
    '<aside class="toc-drawer': '<aside aria-label="Contents of the page" class="toc-drawer',
}
#: Parameters on lines of their own: a list of definitions without terms is none.
_PARAMETERS = re.compile(r'<dl>\n((?:<dd><em class="sig-param">.*?</dd>\n)+)</dl>')


def complete(page: str) -> str:
    """The markup of a page with its roles and labels."""
    for before, after in _THEME.items():
        page = page.replace(before, after)
    return _PARAMETERS.sub(lambda match: f'<div class="sig-params">\n{match[1].replace("dd>", "div>")}</div>', page)


def complete_site(app: Sphinx, exception: Exception | None) -> None:
    """Complete all pages that were written."""
    if exception is not None or app.builder.name != "html":
        return
    for path in Path(app.outdir).rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        if any(after not in page for after in _THEME.values()):
            path.write_text(complete(page), encoding="utf-8")
    start = (Path(app.outdir) / f"{app.config.root_doc}.html").read_text(encoding="utf-8")
    for markup in _THEME.values():
        if markup not in start:
            logging.getLogger(__name__).warning("the theme has changed: pages lack %s", markup)


def nest(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:
    """Put the lists of submodules into the items of their modules, between which viewcode writes them."""
    if pagename == "_modules/index":
        body = context["body"].replace("</li>\n<ul>", "\n<ul>")
        context["body"] = body.replace("</ul>", "</ul></li>", body.count("</ul>") - 1)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.connect("html-page-context", nest)
    app.connect("build-finished", complete_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
