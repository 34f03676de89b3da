"""The axes of a plot: those that a caller passes, or those of a new figure in the style of all figures."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@contextmanager
def drawing(name: str, ax: Axes | None, size: tuple[float, float]) -> Iterator[Axes]:
    """The given axes, or those of a new figure.

    Args:
        name: The function that draws, for its errors.
        ax: Where to draw; a new figure if None.
        size: The width and height of a new figure, in inches.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If `ax` is something else.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("qsim.plot needs matplotlib, which is not installed: pip install matplotlib")
    from matplotlib.axes import Axes

    if ax is not None:
        if not isinstance(ax, Axes):
            raise TypeError(f"{name}: ax must be a matplotlib Axes or None, got {ax!r}")
        yield ax
        return
    from matplotlib import pyplot

    from qsim.plot.figures import style

    with style():
        yield pyplot.subplots(figsize=size, layout="constrained")[1]
