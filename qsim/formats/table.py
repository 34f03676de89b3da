"""Formats whose values are listed: any finite set, and the base of formats that list theirs."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from qsim.formats.base import Format, shortest
from qsim_kernels.numbers.grid import Coding
from qsim_kernels.numbers.tables import read_table, table_grid

#: The most values of a table: codes have up to 16 bits.
_MOST = 1 << 16


class Tabulated(Format):
    """Base class of the formats whose values are looked up in a table."""

    def _tabulate(self, text: str, bits: int, nan: int = -1) -> None:
        self._derive(table_grid(text), Coding(bits=bits, twos_complement=False, nan=nan, infinity=-1))

    @property
    def smallest_normal(self) -> float:
        """NaN: precision varies between the values of a table."""
        return math.nan

    @property
    def epsilon(self) -> float:
        """The distance between 1 and the next larger value; NaN if the format lacks one of them."""
        above = [value for value in self.values() if value >= 1]
        return above[1] - 1 if len(above) > 1 and above[0] == 1 else math.nan

    def values(self) -> tuple[float, ...]:
        """Every finite value, sorted.

        Example:
            >>> from qsim.formats import Table
            >>> Table([1, -1, 0]).values()
            (-1.0, 0.0, 1.0)
        """
        return read_table(self.grid.table).values

    def _layout(self) -> list[tuple[str, str]]:
        return [("bits", str(self.bits))]

    def _reserved(self) -> str:
        return "nothing: every code is a finite value" if 1 << self.bits == len(self.values()) else "codes without a value"


@dataclass(frozen=True, repr=False)
class ListedValues(Tabulated):
    """A format of listed values, which `Table` makes.

    Args:
        listed: Different float32 numbers, ascending.
    """

    listed: tuple[float, ...]

    def __post_init__(self) -> None:
        self._tabulate(f"values({','.join(map(repr, self.listed))})", (len(self.listed) - 1).bit_length())

    @property
    def bits(self) -> int:  # type: ignore[override]
        """The number of bits of a code."""
        return self.coding.bits

    def __repr__(self) -> str:
        return f"Table([{', '.join(map(_shortest_single, self.listed))}])"


def Table(values: Iterable[float]) -> ListedValues:  # noqa: N802 (reads as the format it makes)
    """A format of any values: 2 to 65536 finite numbers, rounded to float32 once.

    Codes number the values in ascending order, from zero. Ties go to the neighbour whose code ends in 0. Zero has no sign, nothing is
    infinite, and there is no NaN: `encode` raises an error for one, or writes the code of the largest value. Numbers beyond the largest or
    the smallest value go to it, or with `overflow="nonfinite"` to NaN if the rounding leads outward, however near they are.

    Args:
        values: The values, in any order; each once, and one of them positive.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If there are too few or too many, or one is not finite or not the only one that rounds to its float32.

    Example:
        >>> import torch, qsim
        >>> ternary = qsim.formats.Table([-1, 0, 1])
        >>> qsim.quantize(torch.tensor([-3.0, -0.4, 0.2, 0.6]), ternary).tolist()
        [-1.0, 0.0, 0.0, 1.0]
        >>> qsim.encode(torch.tensor([-1.0, 0.0, 1.0]), ternary)
        tensor([0, 1, 2], dtype=torch.uint8)
    """
    given = tuple(values)
    for value in given:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"Table: values must be numbers, got {value!r}")
    held = tuple(sorted(set(map(single, given))))
    if not 2 <= len(held) <= _MOST:
        raise ValueError(f"Table: values must be 2 to {_MOST} different numbers, got {len(held)}")
    if len(held) != len(given):
        raise ValueError(f"Table: {len(given)} values are only {len(held)} float32 numbers: give each value once")
    if held[-1] <= 0:
        raise ValueError(f"Table: one of the values must be positive, the largest is {shortest(held[-1])}")
    return ListedValues(held)


def _shortest_single(value: float) -> str:
    """The shortest decimal that rounds to a float32."""
    return shortest(next(short for digits in range(1, 10) if single(short := float(f"{value:.{digits}g}")) == value))


def single(value: float) -> float:
    """A number rounded to float32; zero has no sign."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = math.inf
    if not math.isfinite(rounded):
        raise ValueError(f"Table: values must be finite in float32, got {value!r}")
    return rounded + 0.0
