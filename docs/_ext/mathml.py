r"""Formulas as MathML, which browsers show by themselves: pages need no script for them, and no network.

`$\alpha L$` is a formula in a line; one between lines of `$$` has a line of its own.
"""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def in_line(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def on_its_own(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula that has a line of its own."""
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.add_html_math_renderer("mathml", (in_line, None), (on_its_own, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
