"""Linear takums: formats with more digits for numbers near 1, whose exponents take at most eleven bits."""

from __future__ import annotations

from dataclasses import dataclass
from math import ldexp

from qsim.formats.base import check_integer
from qsim.formats.posit import symmetric_table
from qsim.formats.table import Tabulated
from qsim_kernels.numbers.tables import CodedValues, family

#: The smallest and the largest exponent of float32's normal numbers.
_LOWEST, _HIGHEST = -126, 127


@dataclass(frozen=True, repr=False)
class Takum(Tabulated):
    """A linear takum (Hunhold, arXiv 2404.18603 and 2408.10594): sign, direction, regime, characteristic and fraction.

    Takums reach from 2**-255 to 2**255. The values here are those that are normal numbers of float32, so that tensors hold them: codes of
    others decode to NaN. As for `Posit`, rounding to nearest changes at the takum of one more bit that is between two neighbours, and goes
    neither to zero nor to NaR: numbers below the smallest value here go to it.

    Args:
        bits: Width of a code, 2 to 16; codes of fewer than 12 bits are those of 12 that end in zeros.

    Example:
        >>> import torch, qsim
        >>> takum = qsim.formats.Takum(8)
        >>> qsim.quantize(torch.tensor([0.3, 1.0, -3000.0]), takum)
        tensor([ 3.1250e-01,  1.0000e+00, -2.0480e+03])
        >>> takum.max == 2.0**127
        True
    """

    bits: int

    def __post_init__(self) -> None:
        check_integer("Takum", "bits", self.bits, 2, 16)
        self._tabulate(f"takum({self.bits})", self.bits, nan=1 << self.bits - 1)

    def __repr__(self) -> str:
        return f"Takum({self.bits})"

    def _reserved(self) -> str:
        return f"the lowest code: NaR; exponents below {_LOWEST} and above {_HIGHEST}"


@family
def takum(bits: int) -> CodedValues:
    """The table of a takum."""
    positive = {_value(code, bits): code for code in range(1, 1 << bits - 1)}
    kept = {value: code for value, code in positive.items() if 2.0**_LOWEST <= value < 2.0 ** (_HIGHEST + 1)}
    return symmetric_table(kept, bits, {value: _value(2 * code + 1, bits + 1) for value, code in kept.items()})


def _value(code: int, bits: int) -> float:
    """The value of a positive takum, which float64 holds."""
    text = f"{code:0{bits - 1}b}".ljust(16, "0")
    regime = int(text[1:4], 2)
    length = regime if text[0] == "1" else 7 - regime
    least = (1 << length) - 1 if text[0] == "1" else 1 - (2 << length)
    characteristic, fraction = least + int(text[4 : 4 + length] or "0", 2), text[4 + length :]
    return ldexp(int("1" + fraction, 2), characteristic - len(fraction))
