"""The figure of a comparison: the growth of the difference in causal order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from qsim.diagnostics.traces.comparison import RunComparison
from qsim.plot.axes import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The number of labels that fit along the axis.
_LABELS = 24


def growth(comparison: RunComparison, ax: Axes | None) -> Axes:
    """The relative difference of each tensor as a line, the part that arises there as dots, and the first difference marked."""
    records = comparison.records
    with drawing("plot", ax, (7.2, 3.8)) as axes:
        axes.plot([record.error or math.nan for record in records], color="C0", label="difference")
        own = [(place, record.own) for place, record in enumerate(records) if 0 < record.own < math.inf]
        axes.plot([place for place, _ in own], [size for _, size in own], "o", color="C1", markersize=3, label="arises here")
        first = comparison.first
        if first is not None:
            axes.axvline(records.index(first), color="0.5", linewidth=1, linestyle=":", label="first difference")
            axes.set_yscale("log")
        step = max(1, math.ceil(len(records) / _LABELS))
        shown = range(0, len(records), step)
        axes.set_xticks(shown, [f"{records[place].layer or records[place].operation} {records[place].tensor}" for place in shown])
        axes.tick_params(axis="x", labelrotation=90, labelsize=6)
        axes.set_ylabel("relative difference")
        axes.legend(frameon=False)
    return axes
