"""Roundings onto a table in exact arithmetic, one number at a time, from the sentences of the contract; shares no code with the library."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from support.oracle import is_inward, steps


class ExactTable(NamedTuple):
    """Values in ascending order, their codes, and where rounding to nearest changes between neighbours."""

    values: Sequence[Fraction]
    codes: Sequence[int]
    middles: Sequence[Fraction]

    @classmethod
    def of(cls, values: Sequence[Fraction], codes: Sequence[int] | None = None) -> ExactTable:
        """A table whose middles are means, and whose codes count the values if none are given."""
        return cls(values, codes or range(len(values)), [(a + b) / 2 for a, b in itertools.pairwise(values)])


def is_up(rounding: str, x: Fraction, below: Fraction, above: Fraction, codes: tuple[int, int], middle: Fraction) -> bool:
    """Whether a number strictly between two neighbours goes to the upper one; of two as near to zero, the one on its side is nearer."""
    if rounding.startswith("nearest"):
        tie = {"nearest": codes[0] % 2 == 1, "nearest_away": middle >= 0, "nearest_up": True, "nearest_down": False}[rounding]
        return x > middle or (x == middle and tie)
    is_nearer = abs(above) < abs(below) or (abs(above) == abs(below) and x >= 0)
    return {"toward_zero": is_nearer, "up": True, "down": False, "odd": codes[1] % 2 == 1}[rounding]


def round_in_table(
    x: float,
    table: ExactTable,
    rounding: str,
    overflow: str,
    R: int = 0,  # noqa: N803 (the contract's letters)
    r: int = 0,
    correction: bool | str = False,
) -> float:
    """Round one number; `R` is the random integer of stochastic rounding, `r` its number of bits."""
    if math.isnan(x):
        return math.nan
    values, negative = table.values, math.copysign(1.0, x) < 0
    low, high = values[0], values[-1]
    lowest = next(value for value in values if value >= -high) if overflow == "saturate_symmetric" else low
    is_beyond = math.isinf(x) or not low <= Fraction(x) <= high
    if is_beyond and not (x == 0 or (x > 0 and Fraction(min(x, 3e38)) < low)):
        if overflow == "nonfinite" and not (math.isfinite(x) and is_inward(rounding, negative)):
            return math.nan
        return float(high if x > 0 and not negative else lowest)
    exact = max(Fraction(x), low)
    index = bisect_right(values, exact) - 1
    found = values[index]
    if found != exact:
        above = values[index + 1]
        if rounding == "stochastic":
            near, far = (found, above) if exact >= 0 else (above, found)
            share = (exact - near) / (far - near)
            found = far if R + steps(share, r, correction) >= 2**r else near
        elif is_up(rounding, exact, found, above, (table.codes[index], table.codes[index + 1]), table.middles[index]):
            found = above
    return float(max(found, lowest))


def assert_equal(found: Tensor, expected: Sequence[float], case: object = "") -> None:
    """Compare numbers, every NaN as the same; zero has no sign."""
    target = torch.tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, target, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{case}: {text}")
    assert not (found.signbit() & (found == 0)).any()


def around(table: ExactTable, beyond: float) -> list[float]:
    """The float32 numbers where roundings go wrong: values, middles, places between them, their neighbours, and numbers beyond the ends."""
    numbers = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, beyond, -beyond, 1e-30, -1e-30]
    points = {*table.values, *table.middles}
    for a, b in zip(table.values, table.values[1:], strict=False):
        points |= {a + (b - a) * share for share in (Fraction(1, 7), Fraction(1, 4), Fraction(5, 8), Fraction(2, 3))}
    for point in points:
        near = float(point)
        numbers += [near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf)]
    return numbers
