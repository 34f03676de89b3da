"""A linear layer's three products, and the five points at which its operands are rounded."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: The products: where each stands, what goes in with which point, what comes out.
FORWARD, BACKWARD = "C0", "C1"


def draw() -> Figure:
    figure, axes = plt.subplots(figsize=(7.4, 4.0))
    axes.set(xlim=(0, 10), ylim=(0, 6))
    axes.axis("off")
    _tensor(axes, 0.6, 4.9, "A")
    _tensor(axes, 0.6, 3.0, "W")
    _tensor(axes, 9.3, 4.9, "Y")
    _tensor(axes, 9.3, 1.1, "∇Y")
    _tensor(axes, 0.6, 1.9, "∇A")
    _tensor(axes, 0.6, 0.5, "∇W")
    for x, y, colour in ((6.6, 4.9, FORWARD), (3.6, 1.9, BACKWARD), (3.6, 0.5, BACKWARD)):
        axes.text(x, y, "×", ha="center", va="center", fontsize=17, color=colour)
        axes.plot(x, y, "o", markersize=22, markerfacecolor="none", color=colour)
    # Forward: A and W through their points into the product.
    _arrow(axes, FORWARD, (0.95, 4.9), (6.25, 4.9))
    _point(axes, FORWARD, 5.3, 4.9, "act")
    _arrow(axes, FORWARD, (0.95, 3.0), (6.6, 3.0), (6.6, 4.55))
    _point(axes, FORWARD, 5.3, 3.0, "weight")
    _arrow(axes, FORWARD, (6.95, 4.9), (8.95, 4.9))
    # Backward: the gradient into both products, W into one of them, A into the other.
    _arrow(axes, BACKWARD, (8.9, 1.1), (5.4, 1.1), (5.4, 1.9), (3.95, 1.9))
    _arrow(axes, BACKWARD, (5.4, 1.1), (5.4, 0.5), (3.95, 0.5))
    _point(axes, BACKWARD, 7.4, 1.1, "grad")
    _arrow(axes, BACKWARD, (3.6, 3.0), (3.6, 2.25))
    _point(axes, BACKWARD, 3.6, 2.62, "weight_bwd")
    _arrow(axes, BACKWARD, (2.3, 4.9), (2.3, 1.2), (3.35, 0.75))
    _point(axes, BACKWARD, 2.3, 3.9, "act_bwd")
    _arrow(axes, BACKWARD, (3.25, 1.9), (1.05, 1.9))
    _arrow(axes, BACKWARD, (3.25, 0.5), (1.05, 0.5))
    axes.text(9.9, 5.7, "forward", color=FORWARD, ha="right")
    axes.text(9.9, 0.2, "backward", color=BACKWARD, ha="right")
    return figure


def _tensor(axes: Axes, x: float, y: float, name: str) -> None:
    axes.text(x, y, name, ha="center", va="center", fontsize=13)


def _arrow(axes: Axes, colour: str, *stops: tuple[float, float]) -> None:
    """A line through some places, with a head at the last."""
    xs, ys = zip(*stops[:-1], strict=True)
    axes.plot(xs, ys, color=colour, linewidth=1.2)
    axes.annotate("", xy=stops[-1], xytext=stops[-2], arrowprops={"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0})


def _point(axes: Axes, colour: str, x: float, y: float, name: str) -> None:
    """A point: the place where an operand is rounded."""
    box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "none"}
    paper = "white" if plt.rcParams["text.color"] < "#8" else "black"
    axes.text(x, y, f"Q  {name}", ha="center", va="center", color=paper, fontsize=9, bbox=box)
