"""Posits: formats with more digits for numbers near 1, as the standard of 2022 defines them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ldexp

from qsim.formats.base import check_integer
from qsim.formats.table import Tabulated
from qsim_kernels.numbers.tables import CodedValues, family


@dataclass(frozen=True, repr=False)
class Posit(Tabulated):
    """A posit: a sign, a regime of equal bits, up to `es` exponent bits and a fraction, in two's complement.

    Rounding to nearest is that of the standard of 2022: between two neighbours, it changes at the posit of one more bit that is between
    them, which is their mean where they have the same regime and exponent. It never rounds a number to zero, nor to NaR, the only code that
    is not a number. All other roundings choose between neighbours by their values, and may choose zero.

    Args:
        bits: Width of a code, 2 to 16. Float32 holds all values.
        es: Exponent bits; 2 in the standard.

    Raises:
        ValueError: If values are beyond float32's exponents.

    Example:
        >>> import torch, qsim
        >>> posit = qsim.formats.Posit(8, 2)
        >>> posit.max, posit.smallest
        (16777216.0, 5.960464477539063e-08)
        >>> qsim.quantize(torch.tensor([0.3, 1e-30, 3000.0]), posit)
        tensor([3.1250e-01, 5.9605e-08, 3.0720e+03])
    """

    bits: int
    es: int = 2

    def __post_init__(self) -> None:
        check_integer("Posit", "bits", self.bits, 2, 16)
        check_integer("Posit", "es", self.es, 0, 6)
        if (self.bits - 2) << self.es > 126:
            raise ValueError(f"Posit({self.bits}, {self.es}) reaches 2**{(self.bits - 2) << self.es}: at most 2**126 is emulated")
        self._tabulate(f"posit({self.bits},{self.es})", self.bits, nan=1 << self.bits - 1)

    def __repr__(self) -> str:
        return f"Posit({self.bits}, {self.es})"

    def _layout(self) -> list[tuple[str, str]]:
        return [("bits", f"{self.bits} (two's complement, {self.es} exponent)")]

    def _reserved(self) -> str:
        return "the lowest code: NaR"


@family
def posit(bits: int, es: int) -> CodedValues:
    """The table of a posit."""
    codes = range(1, 1 << bits - 1)
    positive = {_value(code, bits, es): code for code in codes}
    return symmetric_table(positive, bits, {_value(code, bits, es): _value(2 * code + 1, bits + 1, es) for code in codes})


def _value(code: int, bits: int, es: int) -> float:
    """The value of a positive posit, which float64 holds."""
    text = f"{code:0{bits - 1}b}"
    run = len(text) - len(text.lstrip(text[0]))
    rest = text[run + 1 :]
    exponent, fraction = rest[:es].ljust(es, "0"), rest[es:]
    regime = run - 1 if text[0] == "1" else -run
    scale = (regime << es) + int(exponent or "0", 2)
    return ldexp(int("1" + fraction, 2), scale - len(fraction))


def symmetric_table(positive: dict[float, int], bits: int, middles: dict[float, float]) -> CodedValues:
    """A table of positive values and their negatives, with codes in two's complement, and zero, which no other number goes to.

    Args:
        positive: Positive values and their codes.
        bits: Width of a code.
        middles: Positive values, and where rounding to nearest leaves them upward.
    """
    coded = {0.0: 0, **positive, **{-value: (1 << bits) - code for value, code in positive.items()}}

    def middle(below: float, above: float) -> float:
        return middles[below] if below > 0 else -middles[-above] if above < 0 else 0.0

    return CodedValues.of(coded, middle)
