"""Links from names in Python code to the pages that describe them, and references to names of Python and torch.

In blocks of code, `qsim.nn.Linear` leads to the API, and `torch.compile` to torch's documentation; names that code imports are resolved.
Nothing is imported for this, and nothing is read from the network: `docs/elsewhere.txt` lists where other projects describe their names.
"""

from __future__ import annotations

import html
import re
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

_CODE = re.compile(r'(?<=<div class="highlight-(?:python|pycon3) notranslate"><div class="highlight">)<pre>.*?</pre>', re.DOTALL)
_NAME = r'<span class="n[a-z]*">[\w.]+</span>'
_DOT = r'<span class="o">\.</span>'
#: A name with its attributes; not one that is an attribute itself.
_DOTTED = re.compile(rf"(?<!{_DOT}){_NAME}(?:{_DOT}{_NAME})*")
_IMPORT = re.compile(r"^(?:>>> )?(?:from (?P<module>[\w.]+) )?import (?P<names>[\w., ]+)$", re.MULTILINE)
_TAGS = re.compile(r"<[^>]+>")


@cache
def elsewhere(source: Path) -> dict[str, str]:
    """The addresses of names of other projects."""
    lines = (source / "elsewhere.txt").read_text(encoding="utf-8").splitlines()
    found, base = {}, ""
    for line in lines:
        name, _, place = line.partition(" ")
        if name == "base":
            base = place
        elif name:
            found[name] = base + place
    return found


def imported(code: str) -> dict[str, str]:
    """Full names after the imports in some code: `nn` is `torch.nn`."""
    names = {"qsim": "qsim", "torch": "torch"}
    for module, listed in _IMPORT.findall(code):
        for part in listed.split(","):
            name, _, other = part.strip().partition(" as ")
            full = f"{module}.{name}" if module else name
            names[other or (name if module else name.partition(".")[0])] = full if module or other else name.partition(".")[0]
    return names


def link(code: str, names: dict[str, str], addresses: dict[str, str]) -> str:
    """Highlighted code with links: the longest part of each name that has an address."""

    def linked(match: re.Match[str]) -> str:
        spans = re.split(f"({_DOT})", match[0])
        parts = [_TAGS.sub("", span) for span in spans]
        first, _, rest = parts[0].partition(".")
        if first not in names:
            return match[0]
        parts[0] = names[first] + (f".{rest}" if rest else "")
        for end in range(len(parts), 0, -2):
            address = addresses.get("".join(parts[:end]))
            if address is not None:
                return f'<a class="code-link" href="{html.escape(address)}">{"".join(spans[:end])}</a>{"".join(spans[end:])}'
        return match[0]

    return _DOTTED.sub(linked, code)


def link_page(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Link the names in the code of a page."""
    if tree is None:
        return
    ours = {
        name: app.builder.get_relative_uri(page, found.docname) + f"#{found.node_id}"
        for name, found in app.env.domains.python_domain.objects.items()
        if not found.aliased
    }
    addresses = elsewhere(Path(app.srcdir)) | ours
    body = context["body"]
    names = imported("\n".join(html.unescape(_TAGS.sub("", code)) for code in _CODE.findall(body)))
    context["body"] = _CODE.sub(lambda match: link(match[0], names, addresses), body)


def refer(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> nodes.reference | None:
    """A reference to a name of another project."""
    address = elsewhere(Path(app.srcdir)).get(node.get("reftarget", "")) if node.get("refdomain") == "py" else None
    return None if address is None else nodes.reference("", "", content, internal=False, refuri=address)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.connect("html-page-context", link_page)
    app.connect("missing-reference", refer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
