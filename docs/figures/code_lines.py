"""Lines of code of formats, and of recipes with the points that they bring along, counted in the source when the figure is drawn."""

import ast
import inspect
import textwrap

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qsim import formats, recipes
from qsim.functional.callables import CallablePoint

FORMATS = (formats.Float, formats.Fixed, formats.PowerOfTwo, formats.Table, formats.Posit, formats.Takum, formats.Log, formats.Dynamic)
NAMES = [cls.__name__ for cls in FORMATS]


def lines(made: object) -> int:
    """The lines of a class or function that hold code: no blank lines, comments or docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(made)))
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    # Written again by ast, a statement takes one line, whatever its formatting.
    return len(ast.unparse(tree).splitlines())


def points_of(name: str) -> set[type]:
    """The classes of the points that are modules, and of those in them."""
    found = set()
    for point in recipes.resolve(name, recipes.named.SHOWN_IN).points.used.values():
        if isinstance(point, CallablePoint) and point.module is not None:
            found |= {type(part) for part in point.module.modules() if type(part).__module__.startswith("qsim.points")}
    return found


def bars(axes: Axes, title: str, names: list[str], counts: list[int], more: list[int]) -> None:
    axes.barh(range(len(names)), counts, color="C0")
    axes.barh(range(len(names)), more, left=counts, color="C0", alpha=0.35)
    for row, (own, brought) in enumerate(zip(counts, more, strict=True)):
        axes.text(own + brought + 2, row, f"{own} + {brought}" if brought else str(own), va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 1.35 * max(own + brought for own, brought in zip(counts, more, strict=True))))
    axes.set_title(title, loc="left")


def draw() -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.8, 0.17 * len(recipes.NAMED) + 0.7))
    bars(left, "formats", NAMES, [lines(cls) for cls in FORMATS], [0] * len(NAMES))
    brought = [sum(lines(cls) for cls in points_of(name)) for name in recipes.NAMED]
    bars(right, "recipes + their points", list(recipes.NAMED), [lines(make) for make in recipes.NAMED.values()], brought)
    return figure
