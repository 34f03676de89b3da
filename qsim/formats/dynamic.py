"""Dynamic tables: the values of 8-bit and 4-bit optimizer states."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from qsim.formats.base import check_flag, check_integer
from qsim.formats.table import Tabulated, single
from qsim_kernels.numbers.tables import CodedValues, family


@dataclass(frozen=True, repr=False)
class Dynamic(Tabulated):
    """The dynamic table of bitsandbytes and torchao: Dettmers, arXiv 1511.04561, and Dettmers et al., arXiv 2110.02861.

    Numbers from 0 to 1 in decades: the highest has half of the values, and each below it half as many. In a decade they are the centres of
    equal intervals from 0.1 to 1. Zero and one are added, and in a signed table the negatives of all others. Codes number the values in
    ascending order. Use it with the largest magnitude of a block as its scale, `PerBlock(256)`.

    Values are rounded to float32 once; the libraries compute them in float32, where some differ in the last bits.

    Args:
        bits: Width of a code, 3 to 8; the number of decades is `bits - 1`.
        signed: Whether there are negative values.

    Example:
        >>> from qsim.formats import Dynamic
        >>> print([round(value, 5) for value in Dynamic(3, signed=False).values()])
        [0.0, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
    """

    bits: int = 8
    signed: bool = True

    def __post_init__(self) -> None:
        check_integer("Dynamic", "bits", self.bits, 3, 8)
        check_flag("Dynamic", "signed", self.signed)
        self._tabulate(f"dynamic({self.bits},{int(self.signed)})", self.bits)

    def __repr__(self) -> str:
        return f"Dynamic({self.bits})" if self.signed else f"Dynamic({self.bits}, signed=False)"


@family
def dynamic(bits: int, signed: int) -> CodedValues:
    """The table of a dynamic format."""
    decades = bits - 1
    positive = {Fraction(1)}
    for decade in range(decades):
        count = 2**decade if signed else 2 ** (decade + 1)
        width = Fraction(9, 10) / count
        positive |= {(Fraction(1, 10) + (i + Fraction(1, 2)) * width) * Fraction(10) ** (decade - decades + 1) for i in range(count)}
    negative = {-value for value in positive if value != 1} if signed else set()
    return CodedValues.of({single(float(value)): code for code, value in enumerate(sorted({Fraction(0)} | positive | negative))})
