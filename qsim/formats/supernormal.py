"""Supernormal floats: the code of negative zero is a further value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qsim.formats.base import check_integer, shortest
from qsim.formats.dtypes import holds
from qsim.formats.floating import Float
from qsim.formats.table import Tabulated, single
from qsim_kernels.numbers.tables import CodedValues, family


@dataclass(frozen=True, repr=False)
class Supernormal(Tabulated):
    """A float whose code of negative zero is another value: Dotzel et al., arXiv 2405.03103, and the authors' code.

    The paper gives E2M1 one value more, on one side of zero: 8 for range, `"e2m1_sr"`, or 5 for precision, `"e2m1_sp"`. All other codes are
    those of the float without special values. Zero has no sign. Of two neighbours whose codes both end in 0, ties go to the smaller one.

    Args:
        exponent: Exponent bits, 1 to 8.
        mantissa: Mantissa bits; a code has up to 16 bits.
        value: The further value, rounded to float32 once.
        bias: The exponent's bias; by default `2**(exponent-1) - 1`.

    Raises:
        ValueError: If the float has that value already, or float32 does not hold the values.

    Example:
        >>> import torch, qsim
        >>> precise = qsim.formats.Supernormal(2, 1, 5.0)
        >>> precise.values()[-4:], precise == qsim.format("e2m1_sp")
        ((3.0, 4.0, 5.0, 6.0), True)
        >>> qsim.quantize(torch.tensor([4.8, -4.8]), precise), qsim.encode(torch.tensor([4.8]), precise)
        (tensor([ 5., -4.]), tensor([8], dtype=torch.uint8))
    """

    exponent: int
    mantissa: int
    value: float
    bias: int = None  # type: ignore[assignment]  # always an int once made

    def __post_init__(self) -> None:
        check_integer("Supernormal", "exponent", self.exponent, 1, 8)
        check_integer("Supernormal", "mantissa", self.mantissa, 0, 15 - self.exponent)
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise TypeError(f"Supernormal: value must be a number, got {self.value!r}")
        plain = Float(self.exponent, self.mantissa, self.bias, specials="none")
        object.__setattr__(self, "bias", plain.bias)
        object.__setattr__(self, "value", single(self.value))
        if not holds(torch.float32, plain):
            raise ValueError(f"Supernormal: float32 must hold the values, and cannot hold those of {plain!r}")
        if self.value in plain.values():
            raise ValueError(f"Supernormal: value must be one that {plain!r} lacks, got {shortest(self.value)}")
        self._tabulate(f"supernormal({self.exponent},{self.mantissa},{self.bias},{self.value!r})", 1 + self.exponent + self.mantissa)

    @property
    def bits(self) -> int:  # type: ignore[override]
        """The number of bits of a code."""
        return self.coding.bits

    def __repr__(self) -> str:
        usual = self.bias == (1 << self.exponent - 1) - 1
        return f"Supernormal({self.exponent}, {self.mantissa}, {shortest(self.value)}{'' if usual else f', bias={self.bias}'})"

    def _layout(self) -> list[tuple[str, str]]:
        layout = f"1 sign, {self.exponent} exponent, {self.mantissa} mantissa"
        return [("bits", f"{self.bits} ({layout}; the code of negative zero is {shortest(self.value)})"), ("bias", str(self.bias))]


@family
def supernormal(exponent: int, mantissa: int, bias: int, value: float) -> CodedValues:
    """The table of a supernormal float."""
    positive = [x for x in Float(exponent, mantissa, bias, specials="none").values() if x > 0]
    sign = 1 << exponent + mantissa
    coded = {0.0: 0, value: sign}
    for code, x in enumerate(positive, start=1):
        coded |= {x: code, -x: sign | code}
    return CodedValues.of(coded)
