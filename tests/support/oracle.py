"""The contract's rounding results in exact arithmetic, one number at a time.

The oracle uses only the public numbers of a format (exponent and mantissa bits, bias, specials; or bits and fraction) and shares no code
with the kernels. It is based on one idea: without their sign, the codes of a format number its values upwards from zero. So neighbours are
neighbouring codes, "even" is the parity of the code, and "as if exponents were unbounded" means that the numbering continues.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, NamedTuple

#: A description of a format: the library's, of which only the numbers are read that were given to make it, or one of this file's.
Format = Any


class Float(NamedTuple):
    """A description of a floating-point format that does not come from the library."""

    exponent: int
    mantissa: int
    bias: int
    specials: str = "ieee"
    subnormals: bool | str = True
    signed: bool = True


FP32 = Float(8, 23, 127)


def kind(description: object) -> str:
    """The name of the kind of a format, a rounding, a scale or an accumulator."""
    return type(description).__name__


DETERMINISTIC = ("nearest", "nearest_away", "nearest_up", "nearest_down", "toward_zero", "up", "down", "odd")
OVERFLOWS = ("saturate", "saturate_symmetric", "nonfinite")


@cache
def power(exponent: int) -> Fraction:
    """Two to an integer power."""
    return Fraction(2) ** exponent


@lru_cache(maxsize=2**16)
def magnitude(fmt: Format, code: int) -> Fraction:
    """The value of a code without its sign; above the top code, the pattern continues."""
    if kind(fmt) == "Fixed":
        return code * power(-fmt.fraction)
    if kind(fmt) == "PowerOfTwo":
        return power(code - fmt.bias)
    assert kind(fmt) == "Float"
    field, fraction = divmod(code, 2**fmt.mantissa)
    if field == 0:
        return fraction * power(1 - fmt.bias - fmt.mantissa)
    return (2**fmt.mantissa + fraction) * power(field - fmt.bias - fmt.mantissa)


def top(fmt: Format) -> int:
    """The unsigned code of the largest finite value."""
    if kind(fmt) == "Fixed":
        return 2 ** (fmt.bits - fmt.signed) - 1
    if kind(fmt) == "PowerOfTwo":
        return 2**fmt.exponent - 2
    assert kind(fmt) == "Float"
    codes = 2 ** (fmt.exponent + fmt.mantissa)
    reserved = {"ieee": 2**fmt.mantissa, "fn": 1, "fnuz": 0, "p3109": 1 if fmt.signed else 2, "none": 0}[fmt.specials]
    return codes - reserved - 1


def bottom(fmt: Format) -> int:
    """The unsigned code of the most negative value; 0 if no value is negative."""
    if kind(fmt) == "PowerOfTwo" or not fmt.signed:
        return 0
    return top(fmt) + 1 if kind(fmt) == "Fixed" and not fmt.symmetric else top(fmt)


def gap(fmt: Format) -> int:
    """The number of codes above zero that are left out of the set, because they would be subnormals."""
    return 2**fmt.mantissa - 1 if kind(fmt) == "Float" and fmt.subnormals is not True else 0


def flushes(fmt: Format) -> bool:
    """Whether numbers between zero and the smallest value are zeros before they are rounded."""
    return kind(fmt) == "Float" and fmt.subnormals == "flush"


def lowest_exponent(fmt: Format) -> int:
    """The exponent of the smallest number with a full significand."""
    return -fmt.bias if kind(fmt) == "PowerOfTwo" else 1 - fmt.bias


def largest(fmt: Format) -> Fraction:
    """The largest finite value."""
    return magnitude(fmt, top(fmt))


@cache
def positive_values(fmt: Format) -> list[Fraction]:
    """All positive finite values, in ascending order."""
    codes = range(0 if kind(fmt) == "PowerOfTwo" else gap(fmt) + 1, top(fmt) + 1)
    return [magnitude(fmt, code) for code in codes]


def has_infinity(fmt: Format) -> bool:
    """Whether the format has a code for infinity."""
    return kind(fmt) == "Float" and fmt.specials in ("ieee", "p3109")


def has_nan(fmt: Format) -> bool:
    """Whether the format has a code for NaN: the top exponent of an IEEE format without mantissa only encodes infinity."""
    if kind(fmt) == "Float":
        return fmt.specials in ("fn", "fnuz", "p3109") or (fmt.specials == "ieee" and fmt.mantissa > 0)
    return kind(fmt) == "PowerOfTwo"


def has_negative_zero(fmt: Format) -> bool:
    """Whether zero keeps its sign."""
    return kind(fmt) == "Float" and fmt.signed and fmt.specials not in ("fnuz", "p3109")


def neighbours(fmt: Format, value: Fraction) -> tuple[int, int]:
    """The unsigned codes of the neighbours of a non-negative number; the lower one may equal it."""
    end = 1
    while magnitude(fmt, end) <= value:
        end *= 2
    low = 0
    while end - low > 1:
        middle = (low + end) // 2
        low, end = (middle, end) if magnitude(fmt, middle) <= value else (low, middle)
    return (0, gap(fmt) + 1) if low <= gap(fmt) else (low, end)


def goes_up(rounding: str, negative: bool, low: int, p: Fraction, random: int, bits: int, correction: bool) -> bool:
    """Whether a number at position `p` between its neighbours, 0 < p < 1, goes to the one of larger magnitude."""
    if rounding == "stochastic":
        return random + math.floor(p * 2**bits + (Fraction(1, 2) if correction else 0)) >= 2**bits
    half = Fraction(1, 2)
    return {
        "nearest": p > half or (p == half and low % 2 == 1),
        "nearest_away": p >= half,
        "nearest_up": p > half or (p == half and not negative),
        "nearest_down": p > half or (p == half and negative),
        "toward_zero": False,
        "up": not negative,
        "down": negative,
        "odd": low % 2 == 0,
    }[rounding]


def is_inward(rounding: str, negative: bool) -> bool:
    """Whether a rounding never takes a finite number past the end of the set, as in IEEE 754: also if the set ends at zero."""
    return rounding == "toward_zero" or (rounding == "up" and negative) or (rounding == "down" and not negative)


def round_exact(
    x: float,
    fmt: Format,
    rounding: str,
    overflow: str,
    R: int = 0,  # noqa: N803 (the contract's letters)
    r: int = 0,
    correction: bool = False,
) -> float:
    """Round one number according to the contract.

    Args:
        x: Any float: finite, infinite or NaN.
        fmt: The format.
        rounding: One of `DETERMINISTIC`, or `"stochastic"`.
        overflow: One of `OVERFLOWS`.
        R: The random integer of stochastic rounding.
        r: Its number of bits.
        correction: Whether half of the last random bit's weight is added.
    """
    if math.isnan(x):
        return math.nan
    negative = math.copysign(1.0, x) < 0
    if kind(fmt) == "PowerOfTwo":
        if x < 0 and overflow == "nonfinite" and not (is_inward(rounding, negative) and math.isfinite(x)):
            return math.nan
        if x < float(magnitude(fmt, 0)):
            return float(magnitude(fmt, 0))
    limit = bottom(fmt) if negative else top(fmt)
    if overflow == "saturate_symmetric":
        limit = min(limit, top(fmt))
    if math.isinf(x):
        return _signed(fmt, limit, negative) if overflow != "nonfinite" else _overflowed(fmt, negative)
    value = abs(Fraction(x))
    low, high = neighbours(fmt, value)
    code = low
    if value != magnitude(fmt, low):
        p = (value - magnitude(fmt, low)) / (magnitude(fmt, high) - magnitude(fmt, low))
        if flushes(fmt) and low == 0:
            return _signed(fmt, 0, negative)
        code = high if goes_up(rounding, negative, low, p, R, r, correction) else low
    if code <= limit:
        return _signed(fmt, code, negative)
    if overflow != "nonfinite" or is_inward(rounding, negative):
        return _signed(fmt, limit, negative)
    return _overflowed(fmt, negative)


def _signed(fmt: Format, code: int, negative: bool) -> float:
    value = float(magnitude(fmt, code))
    if value == 0:
        return -0.0 if negative and has_negative_zero(fmt) else 0.0
    return -value if negative else value


def _overflowed(fmt: Format, negative: bool) -> float:
    if not has_infinity(fmt) or (negative and bottom(fmt) == 0):
        return math.nan
    return -math.inf if negative else math.inf


def decode_exact(code: int, fmt: Format) -> float | None:
    """The value of a code, given as a non-negative integer; None for codes of values that the format leaves out."""
    if kind(fmt) == "Fixed":
        negative = fmt.signed and code >= 2 ** (fmt.bits - 1)
        unsigned = 2**fmt.bits - code if negative else code
        return None if negative and unsigned > bottom(fmt) else _signed(fmt, unsigned, negative)
    if kind(fmt) == "PowerOfTwo":
        return math.nan if code > top(fmt) else _signed(fmt, code, False)
    assert kind(fmt) == "Float"
    sign, unsigned = divmod(code, 2 ** (fmt.exponent + fmt.mantissa))
    if fmt.specials in ("fnuz", "p3109") and sign and unsigned == 0:
        return math.nan
    if unsigned > top(fmt):
        infinite = has_infinity(fmt) and unsigned == top(fmt) + 1
        return (-math.inf if sign else math.inf) if infinite else math.nan
    if 1 <= unsigned <= gap(fmt):
        return None
    return _signed(fmt, unsigned, bool(sign))


def encode_exact(value: float, fmt: Format) -> int | None:
    """The code of a value of the format, as a non-negative integer; None for NaN, which may have several."""
    if math.isnan(value):
        return None
    negative = math.copysign(1.0, value) < 0
    unsigned = top(fmt) + 1 if math.isinf(value) else neighbours(fmt, abs(Fraction(value)))[0]
    if kind(fmt) == "Fixed":
        return (-unsigned if negative else unsigned) % 2**fmt.bits
    if kind(fmt) == "PowerOfTwo":
        return unsigned
    assert kind(fmt) == "Float"
    return unsigned + (2 ** (fmt.exponent + fmt.mantissa) if negative else 0)
