"""Members of classes in the API: those that a base class describes are listed there only, and descriptions are texts, without a type."""

from __future__ import annotations

import sys
from typing import Any

from sphinx.application import Sphinx

#: What napoleon takes for `type: description`.
DESCRIBED = ("attribute", "data", "property")


def without_type(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Begin descriptions with an empty comment: napoleon takes a first line with a colon for a type and its description."""
    if what in DESCRIBED and lines and ":" in lines[0]:
        lines[:0] = ["..", ""]


def described_above(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Skip a class's constants that set a value for one of a base class, whose text they would repeat."""
    owner = app.env.current_document.autodoc_class
    if what != "class" or not name.isupper() or not owner:
        return None
    bases: Any = getattr(sys.modules[app.env.current_document.autodoc_module], owner).__mro__[1:]
    return True if any(name in vars(base) for base in bases) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.connect("autodoc-process-docstring", without_type, priority=100)
    app.connect("autodoc-skip-member", described_above)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
