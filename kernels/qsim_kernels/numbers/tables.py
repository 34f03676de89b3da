"""Tables: any finite set of values with codes, as text, and its grid.

A table reaches this package as text: `values(-1.0,0.0,0.5)`, or the name of another family and its parameters,
as `posit(8,2)`, whose values the function of that name in `FAMILIES` lists.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

from qsim_kernels.numbers.grid import Grid, Rule

#: A number without error: floats are those that float64 holds.
Exact = float | Fraction


def mean(a: float, b: float) -> Fraction:
    """The mean of two numbers."""
    return (Fraction(a) + Fraction(b)) / 2


class CodedValues(NamedTuple):
    """A finite set of values with their codes.

    Attributes:
        values: The values, ascending; float32 holds each.
        codes: Their codes.
        middles: The numbers halfway between neighbours, exactly: where rounding to nearest changes from one to the other.
    """

    values: tuple[float, ...]
    codes: tuple[int, ...]
    middles: tuple[Exact, ...]

    @classmethod
    def of(cls, coded: dict[float, int], middle: Callable[[float, float], Exact] = mean) -> CodedValues:
        """A table from its values and their codes, and a function that gives the middle of two neighbours: by default their mean."""
        ordered = sorted(coded)
        middles = tuple(middle(a, b) for a, b in pairwise(ordered))
        return cls(tuple(ordered), tuple(coded[value] for value in ordered), middles)


#: The functions that list the tables of a family, by the name that a table's text begins with.
FAMILIES: dict[str, Callable[..., CodedValues]] = {}


def family(function: Callable[..., CodedValues]) -> Callable[..., CodedValues]:
    """Make a function that lists values known by its name."""
    FAMILIES[function.__name__] = function
    return function


@family
def values(*listed: float) -> CodedValues:
    """The table of numbers in ascending order, whose codes count them."""
    return CodedValues.of({value: code for code, value in enumerate(listed)})


@cache
def read_table(text: str) -> CodedValues:
    """The table of a text.

    Raises:
        ValueError: If no family has that name.

    Example:
        >>> read_table("values(-1.0,0.0,0.5)").codes
        (0, 1, 2)
    """
    name, _, parameters = text.removesuffix(")").partition("(")
    if name not in FAMILIES:
        raise ValueError(f"no table has the name {name!r}: known are {', '.join(FAMILIES)}; import qsim to know those of its formats")
    return FAMILIES[name](*(float(number) if "." in number or "e" in number else int(number) for number in parameters.split(",")))


@lru_cache(maxsize=4096)
def table_grid(text: str) -> Grid:
    """The grid of a table."""
    values = read_table(text).values
    places = [significant_bits(value) for value in values if value]
    mantissa, place = max(bits for bits, _ in places) - 1, min(place for _, place in places)
    return Grid(
        mantissa=mantissa,
        exponent=mantissa + place,
        least=min(value for value in values if value > 0),
        max=values[-1],
        min=values[0],
        zero=0 in values,
        negative_zero=False,
        infinity=False,
        table=text,
    )


def significant_bits(value: float) -> tuple[int, int]:
    """The number of significant bits of a number, and the exponent of the last one."""
    count, denominator = abs(value).as_integer_ratio()
    place = 1 - denominator.bit_length()
    zeros = (count & -count).bit_length() - 1
    return count.bit_length() - zeros, place + zeros


def steps_of(text: str, rule: Rule) -> int:
    """The number of steps of a bisection of a rounding's places: as many as values, and up to five where numbers overflow."""
    return (len(read_table(text).values) - 1 + (0 if rule.saturates else 5)).bit_length()
