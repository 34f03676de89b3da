"""Pages of source code share one navigation tree: they are not in it, so that only the way to the site's root differs from page to page."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from sphinx.application import Sphinx

#: A link to another page of the site.
_OWN_LINK = re.compile(r'href="(?![a-z]+:|#)')


def share(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Give a page of source code the tree of the first page, with links from where it is."""
    if page.startswith("_modules/"):
        to_root = "../" * page.count("/")
        context["toctree"] = lambda **options: _OWN_LINK.sub(f'href="{to_root}', _of_root(app)(**options))


@cache
def _of_root(app: Sphinx) -> Callable[..., str]:
    """The tree as the site's first page shows it, computed once for all options."""
    return cache(lambda **options: app.builder._get_local_toctree(app.config.root_doc, **options))  # type: ignore[attr-defined]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    # Before the theme, which renders the tree.
    app.connect("html-page-context", share, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
