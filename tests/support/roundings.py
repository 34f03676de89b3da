"""Points without random bits."""

from __future__ import annotations

from dataclasses import replace

from qsim import FivePoint, Quantizer
from qsim.recipes.five_point import POINTS
from qsim.rounding import NEAREST


def nearest(points: FivePoint) -> FivePoint:
    """The same points with rounding to nearest."""
    given = {name: getattr(points, name) for name in POINTS}
    return replace(points, **{name: replace(point, rounding=NEAREST) for name, point in given.items() if isinstance(point, Quantizer)})
