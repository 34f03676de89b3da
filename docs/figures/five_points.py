"""A linear layer's three products, and the five points at which their operands are rounded; one part for each product."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: For each part: its title and colour, both operands with their points, and the result.
PRODUCTS = {
    "forward": ("forward: $Y = A\\,W^T$", "C0", ("A", "act"), ("W", "weight"), "Y"),
    "inputs": ("backward: $∇A = ∇Y\\,W$", "C1", ("∇Y", "grad"), ("W", "weight_bwd"), "∇A"),
    "weights": ("backward: $∇W = ∇Y^T A$", "C1", ("∇Y", "grad"), ("A", "act_bwd"), "∇W"),
}


def draw(part: str) -> Figure:
    title, colour, upper, lower, result = PRODUCTS[part]
    figure, axes = plt.subplots(figsize=(2.6, 1.6))
    axes.set(xlim=(0, 10), ylim=(0.4, 5.6), title=title)
    axes.axis("off")
    for y, (operand, point) in ((4.5, upper), (1.5, lower)):
        axes.text(0.5, y, operand, ha="center", va="center", fontsize=12)
        axes.plot([1.2, 6.9], [y, y], color=colour, linewidth=1.2)
        _arrow(axes, colour, (6.9, y), (6.9, 3 + (y - 3) * 0.45))
        _point(axes, colour, 3.8, y, point)
    axes.text(6.9, 2.97, "×", ha="center", va="center", fontsize=14, color=colour)
    axes.plot(6.9, 3, "o", markersize=18, markerfacecolor="none", color=colour)
    _arrow(axes, colour, (7.6, 3), (8.7, 3))
    axes.text(9.4, 3, result, ha="center", va="center", fontsize=12)
    return figure


def _arrow(axes: Axes, colour: str, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0})


def _point(axes: Axes, colour: str, x: float, y: float, name: str) -> None:
    """A point: the place where an operand is rounded."""
    box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "none"}
    paper = "white" if plt.rcParams["text.color"] < "#8" else "black"
    axes.text(x, y, name, ha="center", va="center", color=paper, fontsize=9, bbox=box)
