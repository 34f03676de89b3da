"""The style of figures: one font, labelled axes, lines that are distinguishable without colour."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "figure.dpi": 150,
    "savefig.dpi": 200,
    "svg.fonttype": "path",
    # The same picture is the same file.
    "svg.hashsalt": "qsim",
}


@dataclass(frozen=True)
class Look:
    """The style of one line."""

    color: str
    marker: str
    linestyle: Any = "-"

    def __call__(self, **others: Any) -> dict[str, Any]:
        """The arguments of matplotlib's plot functions."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.linestyle, **others}

    def dashed(self) -> Look:
        """The same colour and marker, in dashes."""
        return Look(self.color, self.marker, (0, (4, 2)))

    def alone(self) -> Look:
        """The same marker without a line, for what has no order."""
        return Look(self.color, self.marker, "")


#: From dark to light, so that they stay apart in grey; each has a marker of its own.
LOOKS = (
    Look("#12355b", "o"),
    Look("#b0353a", "s"),
    Look("#2f8f83", "^"),
    Look("#d98e2b", "D"),
    Look("#8d99ae", "v"),
    Look("#c7b8e0", "P"),
)
#: What everything else is held against: full precision, a bound.
REFERENCE = Look("#555555", "", (0, (1, 1.5)))


@contextmanager
def style() -> Iterator[None]:
    """Apply this package's figure style inside the block, regardless of the user's settings."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast(Any, _STYLE))
        yield


def panels(rows: int = 1, columns: int = 1, *, width: float = 3.3, height: float = 2.6, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of its own, which no window knows, and its axes, row by row."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def band(axes: Axes, x: Any, intervals: Any, look: Look, label: str | None = None) -> None:
    """A line through estimates, and their intervals as bars."""
    values = [interval.value for interval in intervals]
    below = [interval.value - interval.low for interval in intervals]
    above = [interval.high - interval.value for interval in intervals]
    axes.errorbar(x, values, yerr=[below, above], label=label, capsize=2, elinewidth=0.9, **look())


def plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis with numbers as people write them, between the powers of ten too where there are few of these."""

    def between(number: float, _: float) -> str:
        low, high = axis.get_view_interval()
        digit = round(number / 10 ** math.floor(math.log10(number) + 1e-9))
        return f"{number:g}" if high / low < 50 and digit in (2, 5) else ""

    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(between)


def legend(figure: Figure, axes: Axes, columns: int) -> None:
    """One legend below all panels, where it hides nothing; lines that are long enough to show their dashes."""
    handles, labels = axes.get_legend_handles_labels()
    # matplotlib puts lines before bars.
    order = sorted(range(len(labels)), key=lambda at: isinstance(handles[at], Line2D))
    figure.legend([handles[at] for at in order], [labels[at] for at in order], loc="outside lower center", ncols=columns, handlelength=3.2)


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write a figure as PNG and as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png")
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
