"""One step of a sum: the bits that a matrix unit keeps of a block of products."""

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import qsim
from qsim.accumulators import Aligned

#: A step of a small unit: four products and the running sum, with this many bits kept below the largest exponent.
TERMS = (("sum so far", 9.25), ("2.5 × 1.25", 3.125), ("0.75 × 0.75", 0.5625), ("3 × −0.375", -1.125), ("0.25 × 0.125", 0.03125))
FRACTION = 6


def draw() -> Figure:
    """The terms of a step in binary, aligned: cells below the last bit kept are cut off."""
    figure, axes = plt.subplots(figsize=(3.9, 3.3))
    ink, top = plt.rcParams["text.color"], max(math.frexp(abs(value))[1] - 1 for _, value in TERMS)
    unit = 2.0 ** (top - FRACTION)
    kept = [math.trunc(value / unit) * unit for _, value in TERMS]
    total = sum(kept)
    found = qsim.matmul(torch.tensor([[value for _, value in TERMS]]), torch.ones(len(TERMS), 1), Aligned(len(TERMS), FRACTION))
    assert found.item() == total, (found, total)
    for row, (name, value) in enumerate((*TERMS, ("new sum", total))):
        for place in range(top + 1, top - FRACTION - 4, -1):
            if math.floor(abs(value) / 2.0**place) % 2:
                inside = place >= top - FRACTION
                cell = Rectangle(
                    (-place - 0.42, -row - 0.38), 0.84, 0.76, facecolor="C0" if inside else "none", edgecolor="C0" if inside else "C1"
                )
                axes.add_patch(cell)
        axes.text(-top - 2.0, -row, name, ha="right", va="center", fontsize=8)
        axes.text(-top + FRACTION + 3.9, -row, f"{value:g}", ha="left", va="center", fontsize=8)
    axes.axvline(-top + FRACTION + 0.5, color=ink, linewidth=0.8, linestyle=":")
    axes.axhline(-len(TERMS) + 0.5, color=ink, linewidth=0.8)
    axes.set(
        xlim=(-top - 6.6, -top + FRACTION + 6.6),
        ylim=(-len(TERMS) - 0.7, 0.7),
        title="one step of a matrix unit",
    )
    places = range(top, top - FRACTION - 4, -3)
    axes.set_xticks([-place for place in places], [f"$2^{{{place}}}$" for place in places])
    axes.set_yticks([])
    axes.spines[["left"]].set_visible(False)
    return figure
