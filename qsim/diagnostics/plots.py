"""Figures of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from qsim.diagnostics.counts import NO_SAMPLE, Counts, Sample
from qsim.plot.axes import drawing
from qsim.plot.figures import LOOKS, style
from qsim.text.percentages import percent

#: Each line also has its own dashes.
COLOURS = tuple(look.color for look in LOOKS)
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
#: The label of the horizontal axis of magnitudes.
EXPONENTS = r"exponent $e$: magnitudes in $[2^e, 2^{e+1})$, after transform and scale"
#: From this many parameters on, they are not named individually.
_NAMED = len(COLOURS) - 1


def exponents(samples: Sequence[Sample], layer: str, step: int | None = None) -> Figure:
    """For each point of a layer, the distribution of magnitudes over powers of two, with the range of the format.

    Args:
        samples: The samples.
        layer: The layer's name.
        step: The step of the sample; the last one with the layer by default.

    Raises:
        ValueError: If the layer was not sampled, or not in that step.
    """
    chosen, points = sampled(samples, layer, step)
    with style():
        figure = Figure(figsize=(6.0, 0.9 + 1.3 * len(points)), layout="constrained")
        # All points share the same powers of two, wide enough for all counts and formats.
        places: list[Axes] = list(figure.subplots(len(points), 1, sharex=True, squeeze=False)[:, 0])
        for axes, counts in zip(places, points, strict=True):
            draw_exponents(axes, counts)
        places[-1].set_xlabel(EXPONENTS)
        places[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.supylabel("share of elements (%)", fontsize=9)
        figure.suptitle(f"{_title(layer)}, step {chosen}", fontsize=10)
        handles, labels = places[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def sampled(samples: Sequence[Sample], layer: str, step: int | None = None) -> tuple[int, list[Counts]]:
    """The selected step, and its counts of a layer.

    Raises:
        ValueError: If the layer was not sampled, or not in that step.
    """
    at_step = {sample.step: [counts for counts in sample if counts.layer == layer] for sample in samples}
    steps = [number for number, points in at_step.items() if points]
    _check_layer(samples, layer)
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ValueError(f"step {chosen} has no sample of the layer {layer!r}; sampled were {', '.join(map(str, steps))}")
    return chosen, at_step[chosen]


def exponents_of_point(samples: Sequence[Sample], layer: str, point: str, step: int | None, ax: Axes | None) -> Axes:
    """The same for one point, in the given axes or a new figure.

    Raises:
        ValueError: If nothing was sampled there.
    """
    chosen, points = sampled(samples, layer, step)
    found = {counts.point: counts for counts in points}
    if point not in found:
        known = ", ".join(map(repr, found))
        raise ValueError(f"monitor: nothing was rounded at {point!r} of {layer!r} in step {chosen}; points there are {known}")
    with drawing("monitor", ax, (6.0, 2.8)) as axes:
        draw_exponents(axes, found[point])
        axes.set_xlabel(EXPONENTS)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("share of elements (%)")
        axes.legend(loc="upper left", frameon=False)
    return axes


def draw_exponents(axes: Axes, counts: Counts) -> None:
    """The distribution of the magnitudes at one point, with the range of its format."""
    smallest, largest = (math.floor(math.log2(value)) for value in counts.range)
    axes.axvspan(smallest, largest + 1, color="0.9", label="the format's range", zorder=0)
    pairs = counts.exponents
    shares = [100 * count / counts.elements for count in pairs.values()]
    outside = [not smallest <= exponent <= largest for exponent in pairs]
    for where, colour, hatch, label in ((False, COLOURS[0], None, "within"), (True, COLOURS[1], "////", "outside")):
        # If there are none, a bar of no height provides the legend entry.
        chosen = [(e + 0.5, share) for e, share, out in zip(pairs, shares, outside, strict=True) if out == where] or [(smallest + 0.5, 0.0)]
        bars: dict[str, Any] = {"width": 1.0, "color": colour, "edgecolor": "white", "linewidth": 0.3, "hatch": hatch}
        axes.bar([e for e, _ in chosen], [share for _, share in chosen], label=f"magnitudes {label} it", **bars)
    facts = counts.shares
    zeros = counts.zero / counts.elements if counts.elements else math.nan
    told = f"saturated {percent(facts['saturated'])}, underflowed {percent(facts['underflowed'])}, zeros {percent(zeros)}"
    axes.set_title(f"{counts.point}: {counts.quantizer}\n{told}", loc="left", fontsize=8)
    axes.set_ylim(bottom=0)


def shares(samples: Sequence[Sample], layer: str) -> Figure:
    """For each point of a layer, the shares of saturated and underflowed elements, and SQNR, over the steps.

    Raises:
        ValueError: If the layer was not sampled.
    """
    _check_layer(samples, layer)
    places: dict[str, list[tuple[int, Counts]]] = {}
    for sample in samples:
        for counts in sample.filter(layer=layer):
            places.setdefault(counts.point, []).append((sample.step, counts))
    with style():
        figure = Figure(figsize=(6.0, 5.2), layout="constrained")
        saturated, underflowed, quality = figure.subplots(3, 1, sharex=True)
        for number, (point, series) in enumerate(places.items()):
            look = _look(number, point, len(series))
            steps = [step for step, _ in series]
            saturated.plot(steps, [counts.shares["saturated"] for _, counts in series], **look)
            underflowed.plot(steps, [counts.shares["underflowed"] for _, counts in series], **look)
            quality.plot(steps, [counts.sqnr if math.isfinite(counts.sqnr) else math.nan for _, counts in series], **look)
        for axes, title in ((saturated, "saturated"), (underflowed, "underflowed to zero")):
            axes.set_title(title, loc="left")
            axes.set_ylabel("share of\nelements (%)")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
            # Tiny shares do not fill the axis.
            axes.set_ylim(0, max(0.01, axes.get_ylim()[1]))
        quality.set_title("signal to quantization noise", loc="left")
        quality.set_ylabel("SQNR (dB)")
        _finish(figure, quality, _title(layer))
    return figure


def cancelled(shares: Mapping[str, list[tuple[int, float]]], totals: list[tuple[int, float]]) -> Figure:
    """The share of cancelled updates over the steps: of each parameter if they are few, else of all parameters, with the spread.

    Args:
        shares: For each parameter, steps and shares.
        totals: The same for all parameters together.

    Raises:
        ValueError: If there is nothing to draw.
    """
    if not totals:
        raise ValueError("no step has been sampled yet, so there is nothing to draw")
    with style():
        figure = Figure(figsize=(6.0, 3.2), layout="constrained")
        axes = figure.subplots()
        if len(shares) <= _NAMED:
            for number, (name, series) in enumerate(shares.items(), start=1):
                axes.plot(*zip(*series, strict=True), **_look(number, name, len(series)))
        else:
            for number, series in enumerate(shares.values()):
                axes.plot(*zip(*series, strict=True), color="0.75", linewidth=0.6, label=None if number else "each parameter")
        axes.plot(*zip(*totals, strict=True), **(_look(0, "all parameters", len(totals)) | {"linewidth": 2.0}))
        axes.set_ylabel("updates cancelled (%)")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        axes.set_ylim(0, 1)
        _finish(figure, axes, None)
    return figure


def _look(number: int, label: str, length: int) -> dict[str, Any]:
    """The style of a line by its number; a line of a single point gets a marker, to be visible."""
    kind = number % len(COLOURS)
    look = {"color": COLOURS[kind], "linestyle": _DASHES[kind], "label": label, "linewidth": 1.4}
    # Lines along the edge of the axes are not clipped.
    return {**look, "marker": "o" if length == 1 else None, "clip_on": False}


def _title(layer: str) -> str:
    return f"layer {layer}" if layer else "the model"


def _finish(figure: Figure, last: Axes, title: str | None) -> None:
    last.set_xlabel("step")
    last.xaxis.set_major_locator(MaxNLocator(integer=True))
    if title is not None:
        figure.suptitle(title, fontsize=10)
    figure.legend(*last.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)


def _check_layer(samples: Sequence[Sample], layer: str) -> None:
    if not samples:
        raise ValueError(NO_SAMPLE)
    known = dict.fromkeys(counts.layer for sample in samples for counts in sample)
    if layer not in known:
        raise ValueError(f"the layer {layer!r} was not sampled; sampled were {', '.join(map(repr, known)) or 'none'}")
