"""Plots of formats and roundings: their values, what numbers become, and the relative error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from qsim import rounding as roundings
from qsim.formats import Format, name_of
from qsim.formats.base import check_flag, shortest
from qsim.functional.expected import corners, expected, within_a_binade
from qsim.plot.axes import drawing
from qsim.rounding import Rounding, Stochastic
from qsim.scaling import block_formats
from qsim.scaling.block_formats import Block

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Wider formats have too many values to draw each of them.
WIDEST_LINE = 16
#: The default number of positive values of a staircase, and the maximum number of values.
STEPS, LARGEST_STAIRCASE = 16, 1024


def number_line(format: str | torch.dtype | Format, *, log: bool = False, ax: Axes | None = None) -> Axes:
    """Plot a mark for each value of a format.

    Args:
        format: A name, a torch dtype or a `Format` of at most 16 bits.
        log: Draw powers of two at equal distances; between zero and the smallest normal the axis stays linear.
        ax: Where to draw; a new figure unless given.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If the format is too wide.

    Example:
        >>> from qsim import plot
        >>> plot.number_line("e2m1").get_title(loc="left")
        'e2m1: 15 values from -6 to 6'
    """
    fmt = _format("number_line", format)
    check_flag("number_line", "log", log)
    if fmt.bits > WIDEST_LINE:
        raise ValueError(f"number_line: {fmt!r} has {fmt.bits} bits, and a line shows the values of at most {WIDEST_LINE}")
    values = fmt.values()
    normal = fmt.smallest_normal if not math.isnan(fmt.smallest_normal) else math.inf
    parts = {
        "zero": [v for v in values if v == 0],
        "subnormal": [v for v in values if 0 < abs(v) < normal],
        "normal": [v for v in values if abs(v) >= normal],
    }
    with drawing("number_line", ax, (6.6, 1.5)) as axes:
        from qsim.plot.figures import LOOKS

        heights = {"zero": (1.0, LOOKS[1], 2.0), "subnormal": (0.55, LOOKS[2], 1.0), "normal": (0.8, LOOKS[0], 1.0)}
        for name, (height, look, width) in heights.items():
            if parts[name]:
                axes.vlines(parts[name], 0, height, colors=look.color, linewidth=width, label=name)
        if log:
            axes.set_xscale("symlog", base=2, linthresh=min(normal, fmt.max))
        axes.set_ylim(0, 1.15)
        axes.set_yticks([])
        axes.grid(False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("value")
        axes.set_title(f"{name_of(fmt)}: {len(values)} values from {shortest(values[0])} to {shortest(values[-1])}", loc="left")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.1, frameon=False)
    return axes


def rounding(
    format: str | torch.dtype | Format,
    rounding: str | Rounding = "nearest",
    *,
    limits: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the rounded value against the number: a staircase. For stochastic rounding, the mean, and the two neighbours as a band.

    Args:
        format: A name, a torch dtype or a `Format`.
        rounding: A name or a `Rounding`.
        limits: The range; by default that of the 16 smallest positive values, and a little beyond.
        ax: Where to draw; a new figure unless given.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If there are no such numbers, or too many values between the limits.

    Example:
        >>> from qsim import plot
        >>> plot.rounding("e2m1", "stochastic").get_title(loc="left")
        'e2m1, stochastic'
    """
    fmt, how = _format("rounding", format), roundings.resolve(rounding)
    values = fmt.values()
    low, high = _limits(values) if limits is None else _checked_limits(limits)
    shown = [v for v in values if low <= v <= high]
    if len(shown) > LARGEST_STAIRCASE:
        raise ValueError(f"rounding: {len(shown)} values lie between {low:g} and {high:g}; choose limits with at most {LARGEST_STAIRCASE}")
    x = corners(shown, low, high)
    found = expected(x, fmt, how)
    with drawing("rounding", ax, (3.8, 3.4)) as axes:
        from qsim.plot.figures import LOOKS, REFERENCE

        axes.plot([low, high], [low, high], label="unrounded", **REFERENCE(linewidth=1.0))
        if isinstance(how, Stochastic):
            axes.fill_between(x, found.below, found.above, color=LOOKS[4].color, alpha=0.45, linewidth=0, label="between the neighbours")
        label = "mean" if isinstance(how, Stochastic) else "rounded"
        axes.plot(x, found.mean, color=LOOKS[0].color, linewidth=1.5, label=label)
        axes.set_xlabel("number")
        axes.set_ylabel("what it becomes")
        axes.set_title(f"{name_of(fmt)}, {_how(how)}", loc="left")
        axes.legend(loc="upper left", frameon=False)
    return axes


def error(format: str | torch.dtype | Format, rounding: str | Rounding = "nearest", *, ax: Axes | None = None) -> Axes:
    """Plot the largest relative error per binade over the range of a format; for stochastic rounding, also the root mean square.

    Args:
        format: A name, a torch dtype or a `Format`.
        rounding: A name or a `Rounding`.
        ax: Where to draw; a new figure unless given.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If nothing has that name.

    Example:
        >>> from qsim import plot
        >>> plot.error("e4m3").get_ylabel()
        'relative error'
    """
    fmt, how = _format("error", format), roundings.resolve(rounding)
    # Two binades beyond either end, where all becomes zero and where all becomes the largest value.
    first, last = math.floor(math.log2(fmt.smallest)) - 2, math.floor(math.log2(fmt.max)) + 3
    edges = 2.0 ** torch.arange(first, last + 1, dtype=torch.float64)
    x = edges[:-1, None] * within_a_binade(fmt)
    found = expected(x, fmt, how)
    with drawing("error", ax, (5.0, 3.0)) as axes:
        from qsim.plot.figures import LOOKS, REFERENCE

        axes.stairs((found.farthest / x).amax(1), edges, baseline=None, color=LOOKS[0].color, linewidth=1.5, label="largest")
        if isinstance(how, Stochastic):
            mean_square = (found.deviation / x).amax(1)
            axes.stairs(mean_square, edges, baseline=None, color=LOOKS[1].color, linewidth=1.5, linestyle="--", label="root mean square")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for text, (place, beside, height) in _marks(fmt).items():
            axes.axvline(place, **REFERENCE(linewidth=1.0))
            where: Any = {"rotation": 90, "ha": beside, "va": "top" if height > 0.5 else "bottom", "fontsize": "small"}
            axes.text(place, height, text, transform=axes.get_xaxis_transform(), **where)
        axes.set_xlabel("magnitude")
        axes.set_ylabel("relative error")
        axes.set_title(f"{name_of(fmt)}, {_how(how)}", loc="left")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.1, frameon=False)
    return axes


def _format(owner: str, format: str | torch.dtype | Format) -> Format:
    found = block_formats.resolve(format)
    if isinstance(found, Block):
        element = name_of(found.element)
        raise ValueError(f"{owner}: {format!r} has scales, which move its values: give the format of its elements, {element!r}")
    return found


def _how(rounding: Rounding) -> str:
    if rounding == Stochastic():
        return "stochastic"
    return repr(rounding) if isinstance(rounding, Stochastic) else str(rounding)


def _limits(values: tuple[float, ...]) -> tuple[float, float]:
    """A range in which single steps can be seen, with a little beyond it."""
    positive = [v for v in values if v > 0][:STEPS]
    margin = positive[-1] / 8
    negative = [0.0, *(v for v in values if v < 0)][-STEPS:]
    return min(negative) - margin, positive[-1] + margin


def _checked_limits(limits: object) -> tuple[float, float]:
    if not isinstance(limits, tuple) or len(limits) != 2 or not all(isinstance(limit, (int, float)) for limit in limits):
        raise TypeError(f"rounding: limits must be two numbers, got {limits!r}")
    low, high = limits
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"rounding: limits must be finite, the lower one first, got {limits}")
    return float(low), float(high)


def _marks(fmt: Format) -> dict[str, tuple[float, str, float]]:
    """The places where a format's precision changes; and on which side of them, at which height, the curve leaves room for their names."""
    found = {"smallest": (fmt.smallest, "right", 0.03), "largest": (fmt.max, "right", 0.98)}
    if fmt.smallest_normal not in (fmt.smallest, fmt.max) and not math.isnan(fmt.smallest_normal):
        found["smallest normal"] = (fmt.smallest_normal, "left", 0.98)
    return found
