"""Roundings onto a table as rows of numbers in which results are looked up: all modes and overflows are such rows."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

from qsim_kernels.numbers.carrier import Carrier
from qsim_kernels.numbers.grid import Mode, Overflow, Rule
from qsim_kernels.numbers.tables import CodedValues, Exact, read_table, significant_bits, steps_of


class TablePlace(NamedTuple):
    """Numbers that a rounding onto a table treats alike, from one on to the next place, as bits of a carrier; see `arithmetic.tables`.

    Attributes:
        first: The key of the first of these numbers: its bits, but in the order of the numbers.
        near: The result. Under stochastic rounding, the neighbour that is nearer to zero.
        far: The other neighbour.
        offset: What is added to the magnitude to get the distance from the near neighbour, in units.
        unit: The exponent field, as if significands were integers, of a unit. Values are multiples of it.
        high: The bits from the 30th on of the distance between the neighbours in units.
        low: Its last 30 bits.
    """

    first: int
    near: int
    far: int
    offset: int = 0
    unit: int = 0
    high: int = 0
    low: int = 1


#: More units would leave 64 bits when they are multiplied by random bits.
_MOST_UNITS = 1 << 57
#: The number of the low bits of a distance between neighbours.
LOW = 30


def memory_of(text: str, rule: Rule, carrier: Carrier, writes_codes: bool = False) -> list[int]:
    """The rows of a rounding onto a table, one after the other, each as long as the next power of two.

    Args:
        text: The table.
        rule: How to round.
        carrier: The carrier.
        writes_codes: Whether results are codes in place of values.
    """
    places, size = places_of(text, rule, carrier, writes_codes), 1 << steps_of(text, rule)
    # Later places are never reached: no number has the key of NaN.
    places += [places[-1]._replace(first=carrier.nan)] * (size - len(places))
    return [number for row in zip(*places, strict=True) for number in row]


def values_by_code(text: str, bits: int, carrier: Carrier) -> list[int]:
    """The bits of the value of each code, NaN for codes without one."""
    table, found = read_table(text), [carrier.nan] * (1 << bits)
    for value, code in zip(table.values, table.codes, strict=True):
        found[code] = carrier.bits(value)
    return found


def places_of(text: str, rule: Rule, carrier: Carrier, writes_codes: bool = False) -> list[TablePlace]:
    """The places of a rounding onto a table, ascending; see `memory_of` for the arguments."""
    table = read_table(text)
    results = list(table.codes) if writes_codes else [carrier.bits(value) for value in table.values]
    if rule.overflow == Overflow.SATURATE_SYMMETRIC:
        unused = bisect_left(table.values, -table.values[-1])
        results[:unused] = [results[unused]] * unused
    if rule.draws:
        inner = _intervals(table.values, results, carrier)
    else:
        inner = [TablePlace(first, result, result) for first, result in zip(_cuts(table, rule, carrier), results[1:], strict=True)]
    return [*_below(table.values[0], results[0], rule, carrier), *inner, *_above(table.values[-1], results[-1], rule, carrier)]


def _below(least: float, end: int, rule: Rule, carrier: Carrier) -> list[TablePlace]:
    """The places below the smallest value. Without values below zero, numbers from zero on are in range."""
    at_end, nan = TablePlace(carrier.sign, end, end), TablePlace(carrier.sign, carrier.nan, carrier.nan)
    if rule.saturates:
        # Below a negative value, the first interval goes on.
        return [] if rule.draws and least < 0 else [at_end]
    finite = at_end if rule.mode in (Mode.UP, Mode.TOWARD_ZERO) else nan
    within = [] if rule.draws and least <= 0 else [at_end._replace(first=_key_from(min(least, 0.0), carrier))]
    return [nan, finite._replace(first=-carrier.infinity), *within]


def _above(largest: float, end: int, rule: Rule, carrier: Carrier) -> list[TablePlace]:
    """The places above the largest value."""
    if rule.saturates:
        return []
    nan = TablePlace(carrier.infinity, carrier.nan, carrier.nan)
    finite = TablePlace(0, end, end) if rule.mode in (Mode.DOWN, Mode.TOWARD_ZERO) else nan
    return [finite._replace(first=key_after(largest, carrier)), nan]


def _cuts(table: CodedValues, rule: Rule, carrier: Carrier) -> list[int]:
    """The key of the first number that goes to each value but the smallest, in a rounding without random bits."""
    neighbours = pairwise(table.values), pairwise(table.codes), table.middles
    return [_cut(*values, *codes, middle, rule.mode, carrier) for values, codes, middle in zip(*neighbours, strict=True)]


def _cut(below: float, above: float, code_below: int, code_above: int, middle: Exact, mode: int, carrier: Carrier) -> int:
    leads_up = {
        Mode.NEAREST: code_below % 2 == 1,
        Mode.NEAREST_AWAY: middle >= 0,
        Mode.NEAREST_UP: True,
        Mode.NEAREST_DOWN: False,
        Mode.TOWARD_ZERO: -below >= above if below < 0 < above else below < 0,
        Mode.UP: True,
        Mode.DOWN: False,
        Mode.ODD: code_above % 2 == 1,
    }[Mode(mode)]
    if mode in (Mode.TOWARD_ZERO, Mode.UP, Mode.DOWN, Mode.ODD):
        # Two numbers of one magnitude on both sides of zero are as near to it.
        if mode == Mode.TOWARD_ZERO and -below == above:
            return _key_from(0.0, carrier)
        return key_after(below, carrier) if leads_up else _key_from(above, carrier)
    if middle in (below, above):
        return _key_from(above, carrier) if middle == above else key_after(below, carrier)
    return _key_from(middle, carrier) if leads_up else key_after(middle, carrier)


def _intervals(values: tuple[float, ...], results: list[int], carrier: Carrier) -> list[TablePlace]:
    """The places between neighbours, and between them and zero if they are on both sides of it."""
    found = []
    for (below, above), (low, high) in zip(pairwise(values), pairwise(results), strict=True):
        if below < 0:
            found.append(_interval(_key_from(below, carrier), above, below, high, low, carrier))
        if above > 0:
            found.append(_interval(_key_from(max(below, 0.0), carrier), below, above, low, high, carrier))
    return found


def _interval(first: int, near: float, far: float, at_near: int, at_far: int, carrier: Carrier) -> TablePlace:
    place = min(significant_bits(value)[1] for value in (near, far) if value)
    at, end = (int(value / 2.0**place) for value in (near, far))
    # Beyond zero, the near neighbour is on the other side: then its distance from zero is added.
    offset, width = -at if far > 0 else at, abs(end - at)
    if max(width, abs(end)) >= _MOST_UNITS:
        raise ValueError(
            f"stochastic rounding between {near!r} and {far!r} is not exact in 64 bits: neighbours in a table must be closer, "
            "or values with fewer significant bits"
        )
    return TablePlace(first, at_near, at_far, offset, place + carrier.bias + carrier.mantissa, width >> LOW, width & (1 << LOW) - 1)


def _key(value: float, carrier: Carrier) -> int:
    """The key of the carrier's number next to a number."""
    bits = carrier.bits(value)
    return bits ^ carrier.nan if bits < 0 else bits


def _number(key: int, carrier: Carrier) -> float:
    """The number with a key."""
    return carrier.value(key) if key >= 0 else -carrier.value(~key)


def _key_from(value: Exact, carrier: Carrier) -> int:
    """The key of a carrier's first number that is not below a value; that of minus zero for zero."""
    key = _key(float(value), carrier)
    while _number(key, carrier) < value:
        key += 1
    while _number(key - 1, carrier) >= value:
        key -= 1
    return key


def key_after(value: Exact, carrier: Carrier) -> int:
    """The key of a carrier's first number above a value."""
    key = _key_from(value, carrier)
    while _number(key, carrier) == value:
        key += 1
    return key
