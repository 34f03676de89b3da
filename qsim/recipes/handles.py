"""Names that stand for points where a compiler takes only plain constants."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from qsim.recipes.five_point import FivePoint

_POINTS: WeakValueDictionary[str, FivePoint] = WeakValueDictionary()
_NUMBERS = count()


def new_handle(points: FivePoint) -> str:
    """A new name for points, which it does not keep alive."""
    handle = f"points {next(_NUMBERS)}"
    _POINTS[handle] = points
    return handle


def with_handle(handle: str) -> FivePoint:
    """The points that a handle stands for."""
    return _POINTS[handle]
