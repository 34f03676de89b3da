"""Fixed-point and integer formats."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qsim.formats.base import BIAS_LIMIT, Format, check_flag, check_integer
from qsim_kernels.numbers.grid import Coding, Grid


@dataclass(frozen=True, repr=False)
class Fixed(Format):
    """A fixed-point format: integers in two's complement, in steps of `2**-fraction`.

    Args:
        bits: Width, 1 to 32.
        fraction: Number of fractional bits; may be negative or larger than `bits`.
        signed: Two's complement; otherwise from zero up.
        symmetric: Leave out the lowest code, so that `min` is `-max`.

    Example:
        >>> import qsim
        >>> q = qsim.Fixed(8, 4)
        >>> q.min, q.max, q.smallest
        (-8.0, 7.9375, 0.0625)
    """

    bits: int
    fraction: int
    signed: bool = True
    symmetric: bool = False

    def __post_init__(self) -> None:
        check_integer("Fixed", "bits", self.bits, 1, 32)
        check_integer("Fixed", "fraction", self.fraction, -BIAS_LIMIT, BIAS_LIMIT)
        check_flag("Fixed", "signed", self.signed)
        check_flag("Fixed", "symmetric", self.symmetric)
        if self.symmetric and not self.signed:
            raise ValueError("Fixed: symmetric=True leaves out the lowest negative code, which an unsigned format lacks")
        if self.symmetric and self.bits == 1:
            raise ValueError("Fixed: a symmetric format needs at least 2 bits; 1 bit leaves only zero")
        self._derive(*self._facts())

    def _facts(self) -> tuple[Grid, Coding]:
        magnitude = self.bits - int(self.signed)
        step = math.ldexp(1.0, -self.fraction)
        largest = ((1 << magnitude) - 1) * step
        lowest = -largest if self.symmetric else -(1 << magnitude) * step
        grid = Grid(
            mantissa=magnitude,
            exponent=magnitude - self.fraction,
            least=step,
            max=largest,
            min=lowest if self.signed else 0.0,
            zero=True,
            negative_zero=False,
            infinity=False,
        )
        return grid, Coding(bits=self.bits, twos_complement=True, nan=-1, infinity=-1)

    @property
    def precision(self) -> int:
        """The number of significant bits of the most precise value."""
        return max(1, self.grid.mantissa)

    @property
    def smallest_normal(self) -> float:
        """One step: every value of a fixed-point format is a multiple of it."""
        return self.grid.least

    @property
    def epsilon(self) -> float:
        """One step: the distance between any two neighbours."""
        return self.grid.least

    def __repr__(self) -> str:
        options = [("signed", self.signed, True), ("symmetric", self.symmetric, False)]
        given = [f"{name}={value!r}" for name, value, default in options if value != default]
        head = f"Int({self.bits}" if self.fraction == 0 else f"Fixed({self.bits}, {self.fraction}"
        return ", ".join([head, *given]) + ")"

    def _layout(self) -> list[tuple[str, str]]:
        kind = "two's complement" if self.signed else "unsigned"
        return [("bits", f"{self.bits} ({kind})"), ("fraction", str(self.fraction))]

    def _reserved(self) -> str:
        return "the lowest code (symmetric)" if self.symmetric else "nothing: every code is a finite value"


def Int(bits: int, signed: bool = True, symmetric: bool = False) -> Fixed:  # noqa: N802 (reads as the format it makes)
    """An integer format: fixed point without fractional bits.

    Args:
        bits: Width, 1 to 32.
        signed: Two's complement; otherwise from zero up.
        symmetric: Leave out the lowest code, so that `min` is `-max`.

    Example:
        >>> import qsim
        >>> qsim.Int(8).min, qsim.Int(8, symmetric=True).min
        (-128.0, -127.0)
    """
    return Fixed(check_integer("Int", "bits", bits, 1, 32), 0, signed, symmetric)
