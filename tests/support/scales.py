"""Scales computed in fractions, and blocks whose scales are easy to get wrong."""

from __future__ import annotations

import math
from fractions import Fraction

from support.oracle import Format, largest, positive_values

SMALLEST = Fraction(1, 2**127)


def nearest(x: Fraction, values: list[Fraction]) -> Fraction:
    """The nearest of positive values, ties to the one with an even number; numbers outside go to the ends."""
    if x <= values[0]:
        return values[0]
    if x >= values[-1]:
        return values[-1]
    above = next(i for i, v in enumerate(values) if v >= x)
    low, high = values[above - 1], values[above]
    if x - low != high - x:
        return low if x - low < high - x else high
    return high if _is_even(high, above, values) else low


def _is_even(value: Fraction, index: int, values: list[Fraction]) -> bool:
    # Codes count up from that of the smallest value, which is 1 where there is a zero before it.
    return (index + 1) % 2 == 0


def floor_log2(x: Fraction) -> int:
    power = x.numerator.bit_length() - x.denominator.bit_length()
    return power if Fraction(2) ** power <= x else power - 1


def to_precision(x: Fraction, mantissa: int) -> Fraction:
    unit = Fraction(2) ** (floor_log2(x) - mantissa)
    return round(x / unit) * unit


def bits_after_the_first(fmt: Format) -> int:
    """Significant bits of a format's most precise value, without the first."""
    positive = positive_values(fmt)
    integers = [int(value / min(positive)) for value in positive]
    return max((n // (n & -n)).bit_length() for n in integers) - 1


def scale_of(block: list[float], element: Format, fmt: Format, rule: str, margin: int) -> Fraction | None:
    """The scale, or None for NaN."""
    if not all(map(math.isfinite, block)):
        return None
    a, most, values = max(abs(Fraction(x)) for x in block), largest(element), positive_values(fmt)
    least = max(values[0], SMALLEST)
    if not a:
        return least
    if rule == "fit":
        chosen = nearest(a * Fraction(2) ** margin / most, values)
    elif rule == "ceil":
        wanted = a * Fraction(2) ** margin / most
        chosen = next((v for v in values if v >= wanted), values[-1])
    else:
        a = Fraction(2) ** -floor_log2(1 / a) if rule == "ceil_log2" else a
        a = to_precision(a, bits_after_the_first(element)) if rule == "even" else a
        chosen = nearest(Fraction(2) ** (floor_log2(a) - floor_log2(most) + margin), values)
    return max(chosen, least)


BLOCKS = {
    "mixed": [0.3, -1.7, 2.5, 0.01],
    "equal": [0.7] * 4,
    "one outlier": [1e-3, 2e-3, 5e4, -1e-3],
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "tiny": [2.0**-149, 2.0**-140, -(2.0**-145), 0.0],
    "subnormal": [1e-39, -3e-40, 2e-41, 1e-38],
    "huge": [3e38, -1e38, 1.0, 0.0],
    "nan": [1.0, math.nan, 2.0, 3.0],
    "inf": [1.0, -math.inf, 2.0, 3.0],
    "a power of two": [4.0, 1.0, -0.5, 3.0],
    "just above": [4.0000004768, 1.0, 0.1, 0.2],
    "957": [957.0, 1.0, -400.0, 480.0],
}
