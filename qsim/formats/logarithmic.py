"""Logarithmic formats: numbers whose logarithms are evenly spaced."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import cache
from math import frexp, ldexp

from qsim.formats.base import check_integer
from qsim.formats.table import Tabulated
from qsim_kernels.numbers.tables import CodedValues, Exact, family, mean


@dataclass(frozen=True, repr=False)
class Log(Tabulated):
    """A logarithmic format: zero, and ±2**(k / 2**fraction_bits) for the integers k of a field of `exponent_bits + fraction_bits` bits.

    A code is a sign and that field, which is k plus half of its range. The field of zeros is zero, with the sign it is NaN. Values are
    rounded to float32 once. Rounding to nearest rounds the logarithm, as logarithmic hardware and LNS-Madam (arXiv 2106.13914) do: it
    changes at the geometric mean of two neighbours, and at half of the smallest value, which goes to zero. Other roundings choose between
    neighbours by their values; so stochastic rounding has no bias.

    Args:
        exponent_bits: Bits of a logarithm before the point, 1 to 7.
        fraction_bits: Bits behind the point, 0 to 10.

    Example:
        >>> import torch, qsim
        >>> log = qsim.formats.Log(4, 1)
        >>> log.values()[-3:]
        (90.5096664428711, 128.0, 181.0193328857422)
        >>> qsim.quantize(torch.tensor([1.18, 1.2, 1.5]), log)
        tensor([1.0000, 1.4142, 1.4142])
    """

    exponent_bits: int
    fraction_bits: int

    def __post_init__(self) -> None:
        check_integer("Log", "exponent_bits", self.exponent_bits, 1, 7)
        check_integer("Log", "fraction_bits", self.fraction_bits, 0, 10)
        if self.exponent_bits + self.fraction_bits < 2:
            raise ValueError("Log: a field of 1 bit has only one value but zero; give at least 2 bits")
        field = self.exponent_bits + self.fraction_bits
        if field > 15:
            raise ValueError(f"Log({self.exponent_bits}, {self.fraction_bits}) has {1 + field} bits: at most 16 are emulated")
        self._tabulate(f"log({self.exponent_bits},{self.fraction_bits})", 1 + field, nan=1 << field)

    @property
    def bits(self) -> int:  # type: ignore[override]
        """The number of bits of a code."""
        return self.coding.bits

    def __repr__(self) -> str:
        return f"Log({self.exponent_bits}, {self.fraction_bits})"

    def _layout(self) -> list[tuple[str, str]]:
        return [("bits", f"{self.bits} (1 sign, {self.exponent_bits} exponent, {self.fraction_bits} fraction)")]

    def _reserved(self) -> str:
        return "the code of negative zero: NaN"


@family
def log(exponent_bits: int, fraction_bits: int) -> CodedValues:
    """The table of a logarithmic format."""
    field = exponent_bits + fraction_bits
    half = 1 << field - 1
    positive = {_single(_power(code - half, fraction_bits)): code for code in range(1, 1 << field)}
    coded = {0.0: 0, **positive, **{-value: code | 1 << field for value, code in positive.items()}}

    def middle(below: float, above: float) -> Exact:
        if 0 in (below, above):
            return mean(below, above)
        codes = positive[abs(below)] + positive[abs(above)]
        return _power(codes - 2 * half, fraction_bits + 1) * (1 if below > 0 else -1)

    return CodedValues.of(coded, middle)


def _power(k: int, fraction_bits: int) -> Fraction:
    """2**(k / 2**fraction_bits), a root to 50 digits: no float64 is as near to it as that."""
    whole, part = divmod(k, 1 << fraction_bits)
    return Fraction(2) ** whole * _root(part, fraction_bits)


@cache
def _root(part: int, fraction_bits: int) -> Fraction:
    return Fraction(Context(prec=50).power(2, Decimal(part) / (1 << fraction_bits)))


def _single(value: Fraction) -> float:
    """A number of at least 2**-126 rounded to float32."""
    _, exponent = frexp(value)
    return ldexp(round(value * Fraction(2) ** (24 - exponent)), exponent - 24)
