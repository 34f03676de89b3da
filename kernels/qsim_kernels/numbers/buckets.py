"""Roundings onto a table in float32's bits for loops and kernels: the leading bits of a number are looked up, and leave few places."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from qsim_kernels.numbers.carrier import SINGLE
from qsim_kernels.numbers.grid import Rule
from qsim_kernels.numbers.places import LOW, TablePlace, key_after, places_of
from qsim_kernels.numbers.tables import read_table

#: The numbers in a loop's memory before the buckets.
HEADER = 4
#: The inverse of a distance that has none among the normal numbers: NaN.
UNFIT = SINGLE.nan
#: The least and the most bits of a number that are not looked up.
_WIDTHS = range(16, 21)
_WORD = (1 << 32) - 1


class Buckets(NamedTuple):
    """The places of a table in buckets of numbers whose leading bits are the same.

    Attributes:
        width: The number of bits behind the leading ones.
        steps: The steps of bisection among a bucket's places.
        starts: The first place of each bucket, from that of the smallest numbers on.
        places: The places. Bisection looks beyond the last one, but never goes there.
    """

    width: int
    steps: int
    starts: list[int]
    places: list[TablePlace]

    @property
    def size(self) -> int:
        """The logarithm of the length of a kernel's rows."""
        return (len(self.places) - 1).bit_length()

    @property
    def fits_words(self) -> bool:
        """Whether 32 bits hold all `TableUnits`, and float32 their scales."""
        return all(max(end, width) <= _WORD and 2.0**-126 <= scale < 2.0**128 for end, width, scale in map(units_of, self.places))

    def loop_memory(self, rule: Rule) -> list[int]:
        """Numbers of 32 bits for loops on a CPU.

        They are the width, the number of buckets, that of places and a zero; the starts; then rows of numbers: the first key of each place,
        its near and far result, and the inverse of their distance.
        """
        inverses = [_inverse(place) if rule.draws else 0 for place in self.places]
        rows = (*zip(*(place[:3] for place in self.places), strict=True), inverses)
        return [self.width, len(self.starts), len(self.places), 0, *self.starts, *chain(*rows)]

    def kernel_memory(self, rule: Rule) -> list[int]:
        """Numbers of 64 bits for kernels, each of two numbers: fewer loads than of one by one.

        They are the start of each bucket, and the key that bisection compares first; then rows of as many numbers as `1 << self.size`. Of a
        stochastic rounding, these are the two results of each place, and its `TableUnits` without their scale. The last two rows have 32
        bits for a place: the scale, or the only result; and the first key.
        """
        reach = 1 << self.steps - 1
        places = self.places + self.places[-1:] * ((1 << self.size) - len(self.places))
        found = [_pair(start, self.places[start + reach].first) for start in self.starts]
        last = [place.near for place in places]
        if rule.draws:
            units = [units_of(place) for place in places]
            found += [_pair(place.far, place.near) for place in places] + [_pair(each.end, each.width) for each in units]
            last = [SINGLE.bits(each.scale) for each in units]
        last += [place.first for place in places]
        return found + [_pair(second, first) for first, second in zip(last[::2], last[1::2], strict=True)]


class TableUnits(NamedTuple):
    """Where an interval between neighbours ends and how wide it is, in units, and one over a unit."""

    end: int
    width: int
    scale: float


def units_of(place: TablePlace) -> TableUnits:
    """The `TableUnits` of a place; of equal neighbours, either of which is right, none."""
    if place.near == place.far:
        return TableUnits(0, 0, 1.0)
    width = (place.high << LOW) + place.low
    return TableUnits(width - place.offset, width, 2.0 ** (SINGLE.bias + SINGLE.mantissa - place.unit))


@lru_cache(maxsize=16)
def buckets_of(text: str, rule: Rule, writes_codes: bool = False) -> Buckets:
    """The buckets of a rounding onto a table, among whose places are those of NaN and of what saturates."""
    places = places_of(text, rule, SINGLE, writes_codes)
    if rule.saturates and rule.draws:
        # Intervals end where numbers saturate: their units count no further.
        below, above = places[0].far, places[-1].far
        places.append(TablePlace(key_after(read_table(text).values[-1], SINGLE), above, above))
        if places[0].near != below:
            places.insert(0, TablePlace(SINGLE.sign, below, below))
    nan = TablePlace(SINGLE.sign, SINGLE.nan, SINGLE.nan)
    places = [nan, places[0]._replace(first=~SINGLE.infinity), *places[1:], nan._replace(first=SINGLE.infinity + 1)]
    firsts = [place.first for place in places]
    width, most = _width(firsts)
    count, steps = 1 << 32 - width, most.bit_length()
    starts = [bisect_right(firsts, bucket << width, 1) - 1 for bucket in range(-count // 2, count // 2)]
    return Buckets(width, steps, starts, places + [places[-1]._replace(first=SINGLE.nan)] * (1 << steps))


def _pair(upper: int, lower: int) -> int:
    """Two numbers of 32 bits in one of 64, with a sign."""
    both = (upper & _WORD) << 32 | lower & _WORD
    return both - (both >> 63 << 64)


def _width(firsts: list[int]) -> tuple[int, int]:
    """The most bits behind the leading ones for which a bucket has two places, or else the fewest; and the most changes within one."""
    for width in reversed(_WIDTHS):
        most = max(Counter(first >> width for first in firsts[1:] if first % (1 << width)).values(), default=1)
        if most == 1:
            break
    return width, most


def _inverse(place: TablePlace) -> int:
    """The bits of one over the distance between two results; zero for equal ones, of which either is right."""
    if place.near == place.far:
        return 0
    inverse = 1 / (SINGLE.number(place.far) - SINGLE.number(place.near))
    return SINGLE.bits(inverse) if 2.0**-126 <= abs(inverse) <= 2.0**126 else UNFIT
