"""The positive values of small formats between 0 and 8 (`near`), and how far a format reaches (`far`)."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import qsim

NEAR = ("e2m1", "int4", "e2m3", "e3m2", "e4m3")
FAR = ("e2m1", "e3m2", "e4m3", "e5m2", "fp16", "bf16")


def near(axes: Axes) -> None:
    for row, name in enumerate(NEAR):
        values = [v for v in qsim.format(name).values() if 0 <= v <= 8]
        axes.hlines(row, 0, 8, linewidth=0.8, color=plt.rcParams["grid.color"])
        axes.plot(values, [row] * len(values), "|", markersize=13, color=f"C{row % 5}")
    axes.set(yticks=range(len(NEAR)), yticklabels=NEAR, ylim=(len(NEAR) - 0.5, -0.5), xlim=(-0.1, 8.1))
    axes.set_title("the values from 0 to 8", loc="left")


def far(axes: Axes) -> None:
    for row, name in enumerate(FAR):
        fmt = qsim.format(name)
        axes.plot([fmt.smallest, fmt.smallest_normal], [row, row], linewidth=3, solid_capstyle="butt", color="C0", alpha=0.4)
        axes.plot([fmt.smallest_normal, fmt.max], [row, row], linewidth=7, solid_capstyle="butt", color="C0")
    axes.set_xscale("log", base=2)
    axes.set(yticks=range(len(FAR)), yticklabels=FAR, ylim=(len(FAR) - 0.5, -0.5))
    axes.set_title("from smallest to largest; thin: subnormals", loc="left")


def draw(part: str) -> Figure:
    figure, axes = plt.subplots(figsize=(3.7, 2.6))
    {"near": near, "far": far}[part](axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    return figure
