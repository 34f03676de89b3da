"""Roundings onto a table for loops in float32's bits: the leading bits of a number are looked up, and leave few places."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import Counter
from typing import NamedTuple

from qsim_kernels.numbers.carrier import SINGLE
from qsim_kernels.numbers.grid import Mode, Rule
from qsim_kernels.numbers.places import TablePlace, places_of

#: The numbers in memory before the buckets.
HEADER = 4
#: The inverse of a distance that has none among the normal numbers: NaN.
UNFIT = SINGLE.nan
#: The least and the most bits of a number that are not looked up.
_WIDTHS = range(16, 21)


class Buckets(NamedTuple):
    """The places of a table in buckets of numbers whose leading bits are the same.

    Attributes:
        steps: The steps of bisection among a bucket's places.
        memory: The number of bits behind the leading ones, that of buckets, that of places and a zero; the first place of each bucket;
            then rows of numbers: the first key of each place, its near and far result, and the inverse of their distance.
    """

    steps: int
    memory: list[int]


def buckets_of(text: str, rule: Rule) -> Buckets:
    """The buckets of a rounding onto a table."""
    places = places_of(text, rule, SINGLE)
    firsts = [place.first for place in places]
    width, most = _width(firsts)
    count, steps = 1 << 32 - width, most.bit_length()
    starts = [bisect_right(firsts, bucket << width, 1) - 1 for bucket in range(-count // 2, count // 2)]
    # Bisection looks beyond the last place, but never goes there.
    places += [places[-1]._replace(first=SINGLE.nan)] * (1 << steps)
    inverses = [_inverse(place) if rule.mode == Mode.STOCHASTIC else 0 for place in places]
    rows = zip(*((place.first, place.near, place.far, inverse) for place, inverse in zip(places, inverses, strict=True)), strict=True)
    return Buckets(steps, [width, count, len(places), 0, *starts, *(number for row in rows for number in row)])


def _width(firsts: list[int]) -> tuple[int, int]:
    """The most bits behind the leading ones for which a bucket has two places, or else the fewest; and the most changes within one."""
    for width in reversed(_WIDTHS):
        most = max(Counter(first >> width for first in firsts[1:] if first % (1 << width)).values(), default=1)
        if most == 1:
            break
    return width, most


def _inverse(place: TablePlace) -> int:
    """The bits of one over the distance between two results; zero for equal ones, of which either is right."""
    near, far = map(_value, (place.near, place.far))
    if place.near == place.far:
        return 0
    inverse = 1 / (far - near)
    if not 2.0**-126 <= abs(inverse) <= 2.0**126:
        return UNFIT
    return _bits(inverse)


def _value(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return value


def _bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
