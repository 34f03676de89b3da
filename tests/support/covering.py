"""A small covering design: fewer tests than the full product of settings, in which settings still meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def dealt(items: Sequence[T], turn: int, hands: int) -> Sequence[T]:
    """Every `hands`-th item, starting from another one at each turn, so that this many turns in a row take all.

    A test that crosses formats, dtypes and roundings deals the roundings, with the sum of the numbers of its format and its dtype as the
    turn. Then each rounding meets each format and each dtype.
    """
    return items[turn % hands :: hands]
