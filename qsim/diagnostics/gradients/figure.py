"""The figure of `gradient_error`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qsim.diagnostics.gradients.error import GradientError
from qsim.diagnostics.gradients.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From light to dark, to be distinguishable in grey as well.
_PARTS = (
    ("sampling", "variance of sampling", "#bdd7e7", ""),
    ("rounding", "variance of rounding", "#3182bd", "//"),
    ("bias", "squared bias", "#252525", ""),
)
_WIDTH = 0.27
_INTERVAL = {"ecolor": "#737373", "capsize": 2, "elinewidth": 1}


def bars(errors: Sequence[GradientError], ax: Axes | None) -> Axes:
    """Bars for each point, relative to the squared gradient, on a logarithmic scale, with their intervals.

    If an interval contains 0, only its upper end is marked.
    """
    import matplotlib.pyplot as plt

    ax = plt.subplots(figsize=(6.8, 3.8), layout="constrained")[1] if ax is None else ax
    norm = errors[0].gradient.value
    marks = "upper end of an interval that contains 0"
    for k, (name, label, colour, hatch) in enumerate(_PARTS):
        placed: list[tuple[float, Estimate]] = [(i + (k - 1) * _WIDTH, getattr(error, name)) for i, error in enumerate(errors)]
        found = [(x, estimate) for x, estimate in placed if estimate.low > 0]
        ends = [(x, estimate.high / norm) for x, estimate in placed if estimate.low <= 0 < estimate.high]
        if ends:
            ax.plot([x for x, _ in ends], [y for _, y in ends], "v", color=colour, mec="#737373", markersize=5, label=marks)
            marks = "_"  # once in the legend is enough
        if not found:
            continue
        places, heights = [x for x, _ in found], [estimate.value / norm for _, estimate in found]
        reach = [(estimate.high - estimate.value) / norm for _, estimate in found]
        ax.bar(places, heights, _WIDTH, yerr=reach, label=label, error_kw=_INTERVAL, color=colour, edgecolor="white", hatch=hatch)
    ax.set_yscale("log")
    ax.set_xticks(range(len(errors)), [error.point.replace("_", "\n_", 1) for error in errors])
    ax.set_xlabel(f"point that rounds; gradient of {errors[0].layer}")
    ax.set_ylabel("part of the squared gradient")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return ax
