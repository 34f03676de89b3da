"""Points as arguments: themselves, a recipe, or one rounding for all points; any of them by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from qsim.formats import Format
from qsim.functional.quantizer import Quantizer
from qsim.recipes.five_point import FivePoint
from qsim.recipes.named import NAMED, resolve
from qsim.recipes.recipe import Recipe
from qsim.scaling.block_formats import Block

#: What points are given as.
PointsLike = FivePoint | Recipe | Quantizer | Format | Block | str | torch.dtype | Mapping[str, Any] | None


def points_of(given: object) -> FivePoint:
    """The points that an argument specifies.

    Args:
        given: A `FivePoint`; a recipe, whose points they are, with modules of their own; a `Quantizer` or a format, which round at all
            points; the name of a recipe or of a format, where the recipe counts if there are both; a dictionary, as `FivePoint.to_dict`
            returns it; or `None`.

    Raises:
        TypeError: If it is nothing of these.
        ValueError: If there is no such name.

    Example:
        >>> import qsim
        >>> from qsim.recipes.points_of import points_of
        >>> print(points_of("e4m3"), points_of("hfp8") == qsim.recipes.hfp8().points, sep="; ")
        act=e4m3, weight=e4m3, grad=e4m3; True
    """
    if isinstance(given, FivePoint):
        return given
    if isinstance(given, Recipe):
        return given.points.with_own_modules()
    if given is None:
        return FivePoint()
    if isinstance(given, Mapping):
        return FivePoint.from_dict(given)
    if not isinstance(given, (str, Quantizer, Format, Block, torch.dtype)):
        allowed = "a FivePoint, a recipe, a Quantizer or a format, the name of a recipe or a format, a dictionary of its points or None"
        raise TypeError(f"points must be {allowed}, got {given!r}")
    return _known(given).with_own_modules()


@lru_cache(maxsize=256)
def _known(given: Any) -> FivePoint:
    """The same points for the same argument, so that their plans are made once."""
    return resolve(given).points if is_recipe(given) else FivePoint(given, given, given)


def is_recipe(given: object) -> bool:
    """Whether a name is a recipe's, or not a format's either, so that the error is that of an unknown recipe."""
    if not isinstance(given, str):
        return False
    if given.partition(".with_")[0].partition("(")[0].strip().lower() in NAMED:
        return True
    try:
        Quantizer(given)
    except (TypeError, ValueError):
        return True
    return False
