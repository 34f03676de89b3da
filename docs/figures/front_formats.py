"""The library at a glance, first of three: formats."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

import qsim

SIZE = (3.5, 3.1)
FORMATS = {"int4": "int4", "e2m1": "e2m1", "e3m1": "e3m1", "e2m3": "e2m3", "e3m2, bias 5": qsim.Float(3, 2, bias=5)}


def draw() -> Figure:
    figure, axes = plt.subplots(figsize=SIZE)
    for row, (name, spec) in enumerate(FORMATS.items()):
        values = [v for v in qsim.format(spec).values() if 0 <= v <= 8]
        axes.hlines(row, 0, 8, linewidth=0.8, color=plt.rcParams["grid.color"])
        axes.plot(values, [row] * len(values), "|", markersize=15, markeredgewidth=1.3, color=f"C{row}")
        axes.text(0, row - 0.36, name, fontsize=8)
    axes.set(ylim=(len(FORMATS) - 0.6, -0.75), xlim=(-0.15, 8.15), yticks=[], xlabel="value")
    axes.spines["left"].set_visible(False)
    axes.set_title("Any format", weight="bold", loc="left")
    return figure
