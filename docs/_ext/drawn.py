"""The directive `drawn`: a figure that a script draws, once for light pages and once for dark ones.

    ```{drawn} ramp
    :alt: A description for screen readers.

    The caption.
    ```

runs `draw()` of `docs/figures/ramp.py`, which returns a matplotlib figure. Several names put figures side by side, or below one another
where the page is narrow. `ramp.nearest` is a part of a figure, a panel that can move: it runs `draw("nearest")`. With `:paper:` a figure is
drawn once, on white: for figures that have colours of their own. With `:wide:` it keeps its size on a phone and scrolls.

A script that reads other files of `docs/` lists them: `READS = ("speed.md",)`.

Each file records which script and theme it was drawn from. The build takes the file in `docs/_static` if there is one whose script has not
changed since; otherwise it draws the figure into `docs/_drawn`, which git ignores. The README's figures are committed, and so should be any
that takes long: `python docs/_ext/drawn.py front_training docs/_static` draws it again.
"""

from __future__ import annotations

import ast
import hashlib
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from qsim.plot.figures import THEMES

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


class Drawn(SphinxDirective):
    """A figure that a script draws, or several side by side."""

    required_arguments = 1
    optional_arguments = 3
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        "alt": directives.unchanged_required,
        "paper": directives.flag,
        "wide": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        """Draws it and puts it on the page, with its caption."""
        if "alt" not in self.options:
            raise self.error(f"drawn: {self.arguments[0]} needs an :alt:")
        source = Path(self.env.srcdir)
        figure = nodes.figure(classes=["drawn", *(["wide"] if "wide" in self.options else [])])
        for name in self.arguments:
            script = script_of(source, name)
            for path in (script, *data(script)):
                self.env.note_dependency(str(path))
            for theme in ["light"] if "paper" in self.options else THEMES:
                target = current(source, name, theme)
                classes = [] if "paper" in self.options else [f"only-{theme}"]
                figure += nodes.image(uri=f"/{target.relative_to(source).as_posix()}", alt=self.options["alt"], classes=classes)
        if self.content:
            held = nodes.Element()
            self.state.nested_parse(self.content, self.content_offset, held)
            caption = nodes.caption()
            caption += held.children[0].children
            figure += caption
        return [figure]


def current(source: Path, name: str, theme: str) -> Path:
    """The file of a figure: the committed one or the last one drawn, if its inputs are unchanged, otherwise a new one."""
    script = script_of(source, name)
    committed, drawn = (source / folder / f"{name}-{theme}.svg" for folder in ("_static", "_drawn"))
    for target in (committed, drawn):
        if is_current(target, script, theme):
            return target
    draw(script, drawn, theme, part=part_of(name))
    return drawn


def is_current(target: Path, script: Path, theme: str) -> bool:
    """Whether a figure was drawn by this script in this theme, as both are now."""
    return target.exists() and inputs(script, theme) in target.read_text(encoding="utf-8")


def inputs(script: Path, theme: str) -> str:
    """A checksum of the script, of its data (`NAME.json` next to it, and what it lists in `READS`) and of the theme's settings.

    The library is not part of it: its numbers are pinned by tests, and a figure that became stale with every commit would never be reused.
    """
    parts = [repr((_SHARED, THEMES[theme])), *(path.read_text(encoding="utf-8") for path in (script, *data(script)))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def data(script: Path) -> list[Path]:
    """The files that a script reads."""
    listed = re.findall(r"^READS = (.+)$", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    own = [script.with_suffix(".json")] if script.with_suffix(".json").exists() else []
    return [*own, *(script.parents[1] / name for names in listed for name in ast.literal_eval(names))]


def draw(script: Path, target: Path, theme: str, *, part: str = "", transparent: bool = True) -> None:
    """Runs a script's `draw()` in the colours of a theme and writes the figure that it returns."""
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.use("Agg")
    target.parent.mkdir(exist_ok=True)
    with mpl.rc_context({**_SHARED, **_colours(*THEMES[theme])}), _one_thread():
        figure = runpy.run_path(str(script))["draw"](*filter(None, [part]))
        figure.savefig(target, metadata={"Date": None, "Source": inputs(script, theme)}, transparent=transparent)
    pyplot.close(figure)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Figures compute little, and on a busy machine threads mostly wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def script_of(source: Path, name: str) -> Path:
    """The script that draws a figure or a part of it."""
    return source / "figures" / f"{name.partition('.')[0]}.py"


def part_of(name: str) -> str:
    """The part of a figure; empty for a whole one."""
    return name.partition(".")[2]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; called by Sphinx."""
    app.add_directive("drawn", Drawn)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    script = script_of(Path(__file__).parents[1], name)
    for theme in THEMES:  # the light one on white, which is shown where a page cannot choose between the two
        draw(script, Path(folder) / f"{name}-{theme}.svg", theme, part=part_of(name), transparent=theme != "light")
