"""A table with colours: the recipes, and the formats to which they round the six operands of a layer's three products."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from qsim import Float, Quantizer, recipes
from qsim.formats import Format
from qsim.recipes.five_point import FivePoint
from qsim.recipes.named import SHOWN_IN

#: The operands, by the names of their points, in three products.
OPERANDS = ("act", "weight", "grad", "weight_bwd", "grad_w", "act_bwd")
TITLES = ("A", "W", "∇Y", "W", "∇Y", "A")
#: Colours by bits.
COLOURS = {4: "C0", 6: "C2", 8: "C1"}


def draw() -> Figure:
    known = {name: recipes.resolve(name, SHOWN_IN).points for name in recipes.NAMED}
    figure, axes = plt.subplots(figsize=(6.8, 0.24 * len(known) + 0.7))
    axes.set(xlim=(0, len(OPERANDS)), ylim=(len(known), -1.3))
    axes.axis("off")
    for start, title in ((0, "forward"), (2, "gradient of A"), (4, "gradient of W")):
        axes.text(start + 1, -0.95, title, ha="center", va="center")
    for column, title in enumerate(TITLES):
        axes.text(column + 0.5, -0.3, title, ha="center", va="center", fontstyle="italic")
    for row, (name, points) in enumerate(known.items()):
        axes.text(-0.05, row + 0.5, name, ha="right", va="center", fontsize=8)
        for column, place in enumerate(OPERANDS):
            _cell(column + 0.02 * (1 - column % 2 * 2), row, *_operand(points, place))
    return figure


def _operand(points: FivePoint, place: str) -> tuple[Format | None, str]:
    """The format of an operand, if it is rounded, and a description."""
    place = "grad" if place == "grad_w" and points.grad_w is None else place
    point = points.used[place]
    if point is None:
        return None, ""
    again = place.endswith("_bwd") and getattr(points, place) == "same"
    rounds = point if isinstance(point, Quantizer) else point.function
    inner = getattr(rounds, "point", rounds)
    turned = getattr(rounds, "transform", None)
    quantizer = inner if isinstance(inner, Quantizer) else getattr(inner, "quantizer", None)
    noisy = "MSEden" in str(point) or (quantizer is not None and quantizer.rounding.is_stochastic)
    marks = [mark for mark, has in (("H", turned is not None), ("S", noisy), ("same", again)) if has]
    return rounds.format, " ".join([_short(rounds.format), *marks])


def _short(fmt: Format) -> str:
    """A format's exponent and mantissa bits, or those of an integer."""
    return f"e{fmt.exponent}m{fmt.mantissa}" if isinstance(fmt, Float) else f"int{fmt.bits}"


def _cell(x: float, y: float, fmt: Format | None, text: str) -> None:
    axes = plt.gca()
    if fmt is None:
        axes.text(x + 0.5, y + 0.5, "–", ha="center", va="center", alpha=0.6)
        return
    colour = COLOURS.get(fmt.bits, "C7")
    axes.add_patch(Rectangle((x + 0.03, y + 0.08), 0.94, 0.84, facecolor=colour, alpha=0.25, edgecolor="none"))
    axes.text(x + 0.5, y + 0.52, text, ha="center", va="center", fontsize=7)
