"""The positive values of small formats between 0 and 8, and how far a format reaches."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

import qsim

NEAR = ("e2m1", "int4", "e2m3", "e3m2", "e4m3")
FAR = ("e2m1", "e3m2", "e4m3", "e5m2", "fp16", "bf16")


def draw() -> Figure:
    figure, (near, far) = plt.subplots(2, 1, figsize=(7.4, 4.6), height_ratios=(5, 4))
    for row, name in enumerate(NEAR):
        values = [v for v in qsim.format(name).values() if 0 <= v <= 8]
        near.hlines(row, 0, 8, linewidth=0.8, color=plt.rcParams["grid.color"])
        near.plot(values, [row] * len(values), "|", markersize=13, color=f"C{row % 5}")
    near.set(yticks=range(len(NEAR)), yticklabels=NEAR, ylim=(len(NEAR) - 0.5, -0.5), xlim=(-0.1, 8.1))
    near.set_title("the values from 0 to 8", loc="left")
    for row, name in enumerate(FAR):
        fmt = qsim.format(name)
        far.plot([fmt.smallest, fmt.smallest_normal], [row, row], linewidth=3, solid_capstyle="butt", color="C0", alpha=0.4)
        far.plot([fmt.smallest_normal, fmt.max], [row, row], linewidth=7, solid_capstyle="butt", color="C0")
    far.set_xscale("log", base=2)
    far.set(yticks=range(len(FAR)), yticklabels=FAR, ylim=(len(FAR) - 0.5, -0.5))
    far.set_title("from the smallest to the largest value; thin: subnormals", loc="left")
    for axes in (near, far):
        axes.spines["left"].set_visible(False)
        axes.tick_params(left=False)
    return figure
