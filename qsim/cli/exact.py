"""Numbers as typed, stored exactly, and their position in a format."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction

import torch

import qsim
from qsim.formats import Format
from qsim.rounding import DEFAULT_BITS, Overflow, Rounding, Stochastic

# Far beyond any format; longer numbers would only take long to print.
_LONGEST_EXPONENT = 5000


@dataclass(frozen=True)
class TypedNumber:
    """A number as typed.

    Attributes:
        text: The number as written.
        exact: Its value; `None` for infinities and NaN.
        carrier: The float64 that rounds to the same values; see `round_to_odd`.
    """

    text: str
    exact: Fraction | None
    carrier: float

    def rounded(self, fmt: Format, rounding: str | Rounding, overflow: Overflow = "saturate") -> float:
        """The number as the library rounds it."""
        x = torch.tensor(self.carrier, dtype=torch.float64)
        return qsim.quantize(x, fmt, rounding=rounding, overflow=overflow).item()


def parse(text: str) -> TypedNumber:
    """Read a decimal number, a hexadecimal one such as `0x1.8p-3`, a fraction such as `1/3`, `inf` or `nan`.

    Raises:
        ValueError: If it is none of these.

    Example:
        >>> parse("0.3").exact
        Fraction(3, 10)
    """
    text = text.strip()
    try:
        if "0x" in text.lower():
            return _from_float(text, float.fromhex(text))
        if "/" in text:
            return _from_fraction(text, Fraction(text))
        decimal = Decimal(text)
    except (ValueError, ZeroDivisionError, OverflowError, InvalidOperation):
        raise ValueError(f"{text!r} is not a number: write 0.3, -1e-5, 1/3, 0x1.8p-3, inf or nan") from None
    if decimal.is_finite() and abs(decimal.adjusted()) > _LONGEST_EXPONENT:
        raise ValueError(f"{text!r}: exponents must be from -{_LONGEST_EXPONENT} to {_LONGEST_EXPONENT}")
    return _from_fraction(text, Fraction(decimal)) if decimal.is_finite() and decimal else _from_float(text, float(text))


def _from_float(text: str, value: float) -> TypedNumber:
    return TypedNumber(text, Fraction(value) if math.isfinite(value) else None, value)


def _from_fraction(text: str, value: Fraction) -> TypedNumber:
    return TypedNumber(text, value, round_to_odd(value))


def round_to_odd(value: Fraction) -> float:
    """The float64 that rounds like the exact value on any coarser grid.

    A value that float64 lacks becomes the neighbour with an odd mantissa, which is neither on a coarser grid nor a midpoint of
    one, unless the value itself is.

    Example:
        >>> round_to_odd(Fraction(1) + Fraction(1, 10**30)) > 1.0
        True
    """
    if abs(value) > Fraction(sys.float_info.max):
        return sys.float_info.max if value > 0 else -sys.float_info.max
    near = float(value)
    if Fraction(near) == value or int(near / math.ulp(near)) % 2:
        return near
    return math.nextafter(near, math.inf if value > Fraction(near) else -math.inf)


@dataclass(frozen=True)
class Neighbours:
    """The position of a number in a format.

    Attributes:
        below: The largest value that is not above the number, if any.
        above: The smallest value that is not below the number, if any.
        position: The fraction of the way from the neighbour nearer to zero to the other one, in 0…1; `None` if one is missing,
            0 if the number is itself a value. Where the neighbours are on both sides of zero, the one on the number's side is farther.
        is_negative: Whether the number is below zero.
    """

    below: float | None
    above: float | None
    position: Fraction | None
    is_negative: bool = field(default=False, repr=False)

    @property
    def inner(self) -> float:
        """The neighbour nearer to zero. Requires a position."""
        return self._both()[self.is_negative]

    @property
    def outer(self) -> float:
        """The neighbour farther from zero. Requires a position."""
        return self._both()[not self.is_negative]

    def _both(self) -> tuple[float, float]:
        if self.below is None or self.above is None:
            raise ValueError("one of the neighbours is missing")
        return self.below, self.above

    def outer_probability(self, draw: Stochastic) -> Fraction | None:
        """The probability that stochastic rounding takes the outer neighbour."""
        if self.position is None:
            return None
        return Fraction(draw.steps(self.position), 2 ** (draw.bits or DEFAULT_BITS))

    def mean(self, probability: Fraction) -> Fraction:
        """The mean of stochastic rounding that takes the outer neighbour with a probability."""
        inner = Fraction(self.inner)
        return inner + (Fraction(self.outer) - inner) * probability


def neighbours(number: TypedNumber, fmt: Format) -> Neighbours:
    """Find a number's neighbours in a format.

    Example:
        >>> from qsim.formats import E4M3
        >>> neighbours(parse("0.3"), E4M3)
        Neighbours(below=0.28125, above=0.3125, position=Fraction(3, 5))
    """
    below, above = number.rounded(fmt, "down"), number.rounded(fmt, "up")
    # Saturation moves values beyond the ends inwards, so the ends are not neighbours there.
    bounds = below if below <= number.carrier else None, above if above >= number.carrier else None
    if number.exact is None or bounds[0] is None or bounds[1] is None:
        return Neighbours(*bounds, None)
    gap, is_negative = Fraction(above) - Fraction(below), number.exact < 0
    way = Fraction(above) - number.exact if is_negative else number.exact - Fraction(below)
    return Neighbours(*bounds, way / gap if gap else Fraction(0), is_negative)


def code_of(value: float, fmt: Format) -> int | None:
    """The code of a value of the format, of an infinity or of NaN; `None` if it has none."""
    if (value != value and not fmt.has_nan) or (abs(value) == math.inf and not fmt.has_inf):
        return None
    code = qsim.encode(torch.tensor(value, dtype=torch.float64), fmt, overflow="nonfinite").item()
    return int(code) & ((1 << fmt.bits) - 1)
