"""Looks, once the site is built, whether every link within it leads somewhere; one that does not is a warning."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from sphinx.application import Sphinx
from sphinx.util import logging

_LINK = re.compile(r'(?:href|src)="([^"]+)"')
_ELSEWHERE = re.compile(r"[a-z]+:|#$")


def check(app: Sphinx, exception: Exception | None) -> None:
    """Warns of links to files or places that are not there."""
    if exception is not None or app.builder.name != "html":
        return
    root = Path(app.outdir)
    for page in sorted(root.rglob("*.html")):
        # Of an object that has two public names, viewcode's pages of source code may link to the one that is not documented.
        if page.relative_to(root).parts[0] == "_modules":
            continue
        for link in dict.fromkeys(_LINK.findall(page.read_text(encoding="utf-8"))):
            if not _ELSEWHERE.match(link) and not leads_somewhere(page, link):
                logging.getLogger(__name__).warning("%s: dead link: %s", page.relative_to(root), link)


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether a page's link names a file that exists and, if it names a place in it, one that it has; `x=1` is a page's state."""
    path, _, place = unquote(link).partition("#")
    target = (page.parent / path.partition("?")[0]).resolve() if path else page
    return target.exists() and (not place or "=" in place or target.suffix != ".html" or place in _places(target))


@cache
def _places(page: Path) -> frozenset[str]:
    return frozenset(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
