"""The base class of formats: properties that follow from the grid of values and the codes."""

from __future__ import annotations

import math

from qsim_kernels.numbers.grid import Coding, Grid, spell

#: Formats wider than this have too many values to list.
LISTABLE_BITS = 20

#: With biases beyond this, float64 no longer holds every value and every midpoint exactly.
BIAS_LIMIT = 500


def check_integer(owner: str, name: str, value: object, low: int, high: int) -> int:
    """Check that `value` is an integer in a range, and return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} must be an int, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{owner}: {name} must be in {low}…{high}, got {value}")
    return value


def check_flag(owner: str, name: str, value: object) -> None:
    """Check that `value` is `True` or `False`: anything else would be taken for one of them, or for a number."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be True or False, got {value!r}")


def check_flags(owner: str, **flags: object) -> None:
    """`check_flag` for several options by name."""
    for name, value in flags.items():
        check_flag(owner, name, value)


def shortest(value: float) -> str:
    """Format a number in full: the shortest decimal that parses to exactly this float64, integers without a decimal point.

    Example:
        >>> shortest(448.0), shortest(0.001953125), shortest(-0.0)
        ('448', '0.001953125', '-0')
    """
    return repr(value).removesuffix(".0")


class Format:
    """A finite set of values and the codes that represent them. Create a subclass: `Float`, `Fixed`, `Int`, `PowerOfTwo` or `Table`.

    Attributes:
        bits: Width of a code.
        grid: Finite values, as parameters for the kernels.
        coding: Codes, as parameters for the kernels.
        spelling: Both as text, the form that operators take.

    Example:
        >>> import qsim
        >>> [isinstance(qsim.format(name), qsim.formats.Format) for name in ("e4m3", "int8", "bf16")]
        [True, True, True]
        >>> qsim.format("e2m1").bits, qsim.format("e2m1").max
        (4, 6.0)
    """

    bits: int
    grid: Grid
    coding: Coding
    spelling: tuple[str, str]

    def _derive(self, grid: Grid, coding: Coding) -> None:
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "coding", coding)
        object.__setattr__(self, "spelling", (spell(grid), spell(coding)))

    @property
    def precision(self) -> int:
        """The number of significant bits of the most precise value, including the leading one."""
        return self.grid.mantissa + 1

    @property
    def max(self) -> float:
        """The largest value."""
        return self.grid.max

    @property
    def min(self) -> float:
        """The smallest value: the most negative one where the format is signed."""
        return self.grid.min

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        return self.grid.least

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision; NaN if there is none."""
        normal = math.ldexp(1.0, self.grid.exponent)
        return normal if normal <= self.max else math.nan

    @property
    def epsilon(self) -> float:
        """The distance between 1 and the next larger value, if exponents were unbounded."""
        return math.ldexp(1.0, -self.grid.mantissa)

    @property
    def has_inf(self) -> bool:
        """Whether the format has infinities."""
        return self.coding.infinity >= 0

    @property
    def has_nan(self) -> bool:
        """Whether the format has NaN."""
        return self.coding.nan >= 0

    @property
    def has_zero(self) -> bool:
        """Whether zero is a value."""
        return self.grid.zero

    @property
    def has_negative_zero(self) -> bool:
        """Whether zero keeps its sign."""
        return self.grid.negative_zero

    @property
    def is_signed(self) -> bool:
        """Whether the format has negative values."""
        return self.grid.min < 0

    def values(self) -> tuple[float, ...]:
        """Every finite value, sorted; zero once.

        Raises:
            ValueError: If the format is too wide to list.

        Example:
            >>> from qsim.formats import E2M1
            >>> E2M1.values()[7:]
            (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        """
        if self.bits > LISTABLE_BITS:
            raise ValueError(f"{self!r} has {self.bits} bits: values() lists formats of at most {LISTABLE_BITS} bits")
        grid = self.grid
        found = [0.0] if grid.zero else []
        step = math.ldexp(1.0, grid.exponent - grid.mantissa)
        count = 1 << grid.mantissa
        if grid.least < math.ldexp(1.0, grid.exponent):
            found += [step * k for k in range(1, count)]
        while count * step <= grid.max:
            found += [step * k for k in range(count, 2 * count) if step * k <= grid.max]
            step *= 2
        lowest = [-math.ldexp(1.0, grid.exponent)] if grid.min < -grid.max else []
        negative = [-v for v in reversed(found) if v > 0] if grid.min < 0 else []
        return tuple(lowest + negative + found)

    def describe(self) -> str:
        """Properties of the format, as a human-readable table.

        Example:
            >>> from qsim.formats import E2M1
            >>> print(E2M1.describe())
            Float(2, 1)
              bits             4 (1 sign, 2 exponent, 1 mantissa)
              bias             1
              max              6
              smallest normal  1
              smallest         0.5
              epsilon          0.5
              reserved         nothing: every code is a finite value
        """
        rows = [
            *self._layout(),
            ("max", shortest(self.max)),
            *([] if self.min in (-self.max, 0.0) or not self.has_zero else [("min", shortest(self.min))]),
            ("smallest normal", shortest(self.smallest_normal)),
            ("smallest", shortest(self.smallest)),
            ("epsilon", shortest(self.epsilon)),
            ("reserved", self._reserved()),
        ]
        return "\n".join([repr(self), *(f"  {name:<16} {text}" for name, text in rows)])

    def _layout(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    def _reserved(self) -> str:
        raise NotImplementedError
