"""The directive `drawn`: a figure that the build draws, once for light pages and once for dark ones.

    ```{drawn} ramp
    :alt: What somebody hears who cannot see it.

    The caption.
    ```

runs `draw()` of `docs/figures/ramp.py`, which returns a matplotlib figure. With `:paper:` it is drawn once, on white: for figures that have
colours of their own.

The README's figure lies in the repository: `python docs/_ext/drawn.py front docs/_static` draws it anew.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_SHARED = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "svg.fonttype": "path",
    "svg.hashsalt": "qsim",
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.transparent": True,
}


def _colours(ink: str, faint: str, cycle: list[str]) -> dict[str, Any]:
    from matplotlib import cycler

    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return dict.fromkeys(inks, ink) | {"grid.color": faint, "axes.prop_cycle": cycler(color=cycle)}


#: Each theme's ink, its faint ink, and its colours: those of Okabe and Ito, which the colour-blind tell apart, darker or lighter.
THEMES = {
    "light": ("#222222", "#dddddd", ["#0072b2", "#c75000", "#00805c", "#a8508a", "#8a6d00"]),
    "dark": ("#e6e6e6", "#444444", ["#56b4e9", "#f0883e", "#3fcf9f", "#e29ac8", "#e6c229"]),
}


class Drawn(SphinxDirective):
    """A figure that a script draws."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {"alt": directives.unchanged_required, "paper": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Draws it and puts it on the page, with its caption."""
        name = self.arguments[0]
        if "alt" not in self.options:
            raise self.error(f"drawn: {name} needs an :alt:")
        source = Path(self.env.srcdir)
        script = source / "figures" / f"{name}.py"
        self.env.note_dependency(str(script))
        figure = nodes.figure(classes=["drawn"])
        for theme in ["light"] if "paper" in self.options else THEMES:
            target = source / "_drawn" / f"{name}-{theme}.svg"
            if not target.exists() or target.stat().st_mtime < script.stat().st_mtime:
                draw(script, target, theme)
            classes = [] if "paper" in self.options else [f"only-{theme}"]
            figure += nodes.image(uri=f"/_drawn/{target.name}", alt=self.options["alt"], classes=classes)
        if self.content:
            held = nodes.Element()
            self.state.nested_parse(self.content, self.content_offset, held)
            caption = nodes.caption()
            caption += held.children[0].children
            figure += caption
        return [figure]


def draw(script: Path, target: Path, theme: str, *, transparent: bool = True) -> None:
    """Runs a script's `draw()` in the colours of a theme and writes what it returns."""
    import matplotlib as mpl

    mpl.use("Agg")
    target.parent.mkdir(exist_ok=True)
    with mpl.rc_context({**_SHARED, **_colours(*THEMES[theme])}):
        figure = runpy.run_path(str(script))["draw"]()
        figure.savefig(target, metadata={"Date": None}, transparent=transparent)
    mpl.pyplot.close(figure)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_directive("drawn", Drawn)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    for theme in THEMES:  # the light one on white: it is what readers show that cannot choose between the two
        script, target = Path(__file__).parents[1] / "figures" / f"{name}.py", Path(folder) / f"{name}-{theme}.svg"
        draw(script, target, theme, transparent=theme != "light")
