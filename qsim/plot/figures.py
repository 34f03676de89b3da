"""The style of figures: one font, labelled axes, lines that are distinguishable without colour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from qsim.text.files import whole_file

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
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


#: The inks of each kind of page: text, faint lines, and the cycle `C0`, `C1`, …, Okabe and Ito's colours made darker or lighter.
THEMES = {
    "light": ("#222222", "#dddddd", ["#0072b2", "#c75000", "#00805c", "#a8508a", "#8a6d00"]),
    "dark": ("#e6e6e6", "#444444", ["#56b4e9", "#f0883e", "#3fcf9f", "#e29ac8", "#e6c229"]),
}
#: Each has a marker of its own, so that they are distinguishable in grey.
LOOKS = (Look("C0", "o"), Look("C1", "s"), Look("C2", "^"), Look("C3", "D"), Look("C4", "v"), Look("#808080", "P"))
#: What everything else is held against: full precision, a bound. Legible on light and on dark pages.
REFERENCE = Look("#808080", "", (0, (1, 1.5)))


@contextmanager
def style(theme: str = "light") -> Iterator[None]:
    """Apply this package's figure style inside the block, regardless of the user's settings.

    Args:
        theme: `"light"`: dark inks on white. `"dark"`: light inks on a transparent background, for dark pages.
    """
    ink, faint, colours = THEMES[theme]
    inks = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast(Any, _STYLE | inks))
        matplotlib.rcParams.update({"grid.color": faint, "axes.prop_cycle": cycler(color=colours), "savefig.transparent": theme == "dark"})
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


def bands(axes: Axes, x: Any, lines: Mapping[str, Any], *, alone: bool = False, apart: float = 0.0, times: float = 1.0) -> None:
    """Several lines through estimates, each in a look of its own and moved aside a little, so that their bars do not overlap.

    Args:
        axes: The axes.
        x: The places of the estimates.
        lines: The intervals of each line, by its label.
        alone: Draw markers without lines.
        apart: The distance from one line to the next; the one in the middle is in place.
        times: The factor from one line to the next, on logarithmic axes; the first one is in place.
    """
    for place, (look, (label, intervals)) in enumerate(zip(LOOKS, lines.items(), strict=False)):
        aside = apart * (place - (len(lines) - 1) / 2)
        band(axes, [at * times**place + aside for at in x], intervals, look.alone() if alone else look, label)


def plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis with numbers as people write them, between the powers of ten too where there are few of these."""
    low, high = axis.get_view_interval()
    if high / low < 4:
        # Such a range has a power of ten or none, and few numbers whose first digit is 2 or 5.
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
        return

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


def doubling_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """Make the horizontal axis logarithmic, with these numbers and no others."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def legends(figures: Sequence[Figure], axes: Sequence[Axes], columns: int) -> None:
    """A legend below each of several panels."""
    for figure, panel in zip(figures, axes, strict=True):
        legend(figure, panel, columns)


def row(count: int, *, width: float = 3.5, height: float = 2.8) -> tuple[list[Figure], list[Axes]]:
    """Panels that are figures of their own: a page puts them next to one another where there is room, and elsewhere below."""
    drawn = [panels(width=width, height=height) for _ in range(count)]
    return [figure for figure, _ in drawn], [axes[0] for _, axes in drawn]


def share_y(axes: Sequence[Axes]) -> None:
    """Give panels the same range of values, so that they can be compared."""
    limits = [panel.get_ylim() for panel in axes]
    for panel in axes:
        panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def label_ends(axes: Axes, *, apart: float = 0.085) -> None:
    """Label each line at its right end, in its colour, instead of in a legend.

    Args:
        axes: The axes, with their final limits.
        apart: The least distance between two labels, as a share of the height.
    """
    axes.set_ylim(axes.get_ylim())
    axes.set_xlim(axes.get_xlim())
    found = []
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        line: Any = handle[0] if isinstance(handle, tuple) else handle
        points = [(x, y) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True) if math.isfinite(y)]
        if points:
            x, y = axes.transData.transform(points[-1])
            found.append([*axes.transAxes.inverted().transform((x, y)), label, line.get_color()])
    found.sort(key=lambda each: each[1])
    places = _spread([min(max(each[1], 0.02), 0.98) for each in found], apart)
    for (x, y, label, color), place in zip(found, places, strict=True):
        arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(label, (x, min(max(y, 0), 1)), (1.04, place), "axes fraction", "axes fraction", color=color, fontsize=8, va="center",
                      arrowprops=arrow, annotation_clip=False)  # fmt: skip


def _spread(places: Sequence[float], apart: float) -> list[float]:
    """Move sorted places by as little as possible, until neighbours are far enough apart."""
    found = list(places)
    for _ in range(200):
        for low in range(len(found) - 1):
            missing = apart - (found[low + 1] - found[low])
            if missing > 1e-9:
                found[low] -= missing / 2
                found[low + 1] += missing / 2
    return found


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write a figure as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    with whole_file(path) as draft:
        figure.savefig(draft, format="svg", metadata={"Date": None})
    return path
