"""One sum step by step: the bits that a matrix unit keeps of a block of products, and running sums of four accumulators."""

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import qsim
from qsim.accumulators import Aligned, Promoted, Rounded

#: A step of a small unit: four products and the running sum, with this many bits kept below the largest exponent.
TERMS = (("sum so far", 9.25), ("2.5 × 1.25", 3.125), ("0.75 × 0.75", 0.5625), ("3 × −0.375", -1.125), ("0.25 × 0.125", 0.03125))
FRACTION = 6
LENGTH = 1024


def draw() -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.3), width_ratios=(1.15, 1))
    bits(left)
    sums(right)
    return figure


def bits(axes: Axes) -> None:
    """The terms of a step in binary, aligned: cells below the last bit kept are cut off."""
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


def sums(axes: Axes) -> None:
    """The error of running sums of positive products against their number."""
    generator = torch.Generator().manual_seed(0)
    a, b = (qsim.quantize(torch.rand(16, LENGTH, generator=generator) + 0.25, "e4m3") for _ in range(2))
    steps = range(64, LENGTH + 1, 64)
    exact = [(a[:, :k].double() * b[:, :k].double()).sum(1) for k in steps]
    chosen = (
        ("h100_fp8", qsim.accumulators.resolve("h100_fp8")),
        ("h100_fp8_promoted", qsim.accumulators.resolve("h100_fp8_promoted")),
        ("Rounded('bf16')", Rounded("bf16")),
        ("Promoted(Rounded('bf16'), 32)", Promoted(Rounded("bf16"), 32)),
    )
    for i, (name, accumulator) in enumerate(chosen):
        rows = [qsim.matmul(a[:, None, :k], b[:, :k, None], accumulator).view(-1) for k in steps]
        errors = [((row.double() - right).abs() / right).mean().item() for row, right in zip(rows, exact, strict=True)]
        axes.semilogy(list(steps), errors, label=name, color=f"C{i}", linewidth=1.5)
    axes.set(xlabel="products added", title="mean relative error of running sums", ylim=(1e-6, 1))
    axes.legend(loc="lower right", fontsize=7)
