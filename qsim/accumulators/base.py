"""The base class of accumulators, and the formats of operands that they take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from qsim.formats import FP32, NAMED, Float, Format, contains, name_of
from qsim_kernels.numbers.sums import Sum, spell_sum

#: The smallest normal number of float32 is two to this power.
_LOWEST = -126


class Accumulator:
    """How a matrix product adds. Create a subclass: `Rounded`, `Aligned`, `TwoStep`, `BlockScaled` or `Promoted`.

    Attributes:
        text: The call that creates it, which is also its `repr`.
        is_stochastic: Whether it draws random bits.
        step: Number of products after which a sum may be interrupted: those of a chunk or of a block.
        label: Name of a real unit, which does not count in comparisons: some units add alike.

    Example:
        >>> import qsim
        >>> isinstance(qsim.accumulators.resolve("h100_fp8"), qsim.accumulators.Accumulator)
        True
    """

    text: str
    is_stochastic: bool
    step: int
    label: ClassVar[str] = ""

    def __repr__(self) -> str:
        return self.text

    def sum_of(self, a: Format, b: Format) -> Sum:
        """The description for the kernels of a sum of products of operands in two formats.

        Raises:
            ValueError: If the accumulator does not take operands in one of them.
        """
        raise NotImplementedError

    def takes(self, fmt: Format) -> bool:
        """Whether operands in a format are numbers of the unit, so that it need not be given which of its formats their values are in."""
        return self.taken is None or taken_as(fmt, self.taken) is not None

    def spelled(self, a: Format, b: Format) -> str:
        """`sum_of` as text, the form that the operator takes."""
        return _spelled(self, a, b)

    def describe(self) -> str:
        """Steps of the sum, as a human-readable table.

        Example:
            >>> from qsim import accumulators
            >>> print(accumulators.resolve("h100_fp8_promoted").describe())
            Promoted('h100_fp8', 128)
              every            128 products, a fresh inner sum; the results are added in fp32 with round-to-nearest
              step             32 products and the running sum, added as integers
              aligned to       the largest of their exponents; 13 bits are kept below it, the rest is truncated
              running sum      e8m13ieee, toward_zero
              operands         e4m3, e5m2
        """
        return "\n".join([repr(self), *(f"  {name:<16} {text}" for name, text in self._rows())])

    def _rows(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    @property
    def taken(self) -> tuple[Float, ...] | None:
        """The formats of operands that it takes, if not any."""
        return None

    @property
    def chain(self) -> int:
        """The number of products between two places where scales of operands may change inside the sum; 0 if they may not."""
        return 0

    def _derive(self, text: str, *, is_stochastic: bool, step: int) -> None:
        for name, value in (("text", text), ("is_stochastic", is_stochastic), ("step", step)):
            object.__setattr__(self, name, value)


def labelled(accumulator: Accumulator, label: str) -> None:
    """Give the model of a real unit its name."""
    object.__setattr__(accumulator, "label", label)


def call_of(name: str, *given: str, **options: tuple[object, object]) -> str:
    """The text of a call: positional arguments as they are printed, and options that differ from their defaults."""
    named = [f"{key}={value!r}" for key, (value, default) in options.items() if value != default]
    return f"{name}({', '.join([*given, *named])})"


def brief(fmt: Format) -> str:
    """The shortest text for a format: its name, `ExMyieee`, or its `repr`.

    Example:
        >>> import qsim
        >>> brief(qsim.format("fp16")), brief(qsim.Float(8, 13, specials="ieee")), brief(qsim.Float(4, 4))
        ('fp16', 'e8m13ieee', 'Float(4, 4)')
    """
    # Without the first comparison, `Float(1, 0)` would be compared with a format that has no value but zero, which cannot be made.
    is_ieee = isinstance(fmt, Float) and fmt.specials == "ieee" and fmt == Float(fmt.exponent, fmt.mantissa, specials="ieee")
    if isinstance(fmt, Float) and is_ieee and fmt not in NAMED.values():
        return f"e{fmt.exponent}m{fmt.mantissa}ieee"
    return name_of(fmt)


def smallest_exponent(fmt: Format) -> int:
    """The exponent that an operand's subnormal numbers count with: that of its format's smallest normal number.

    Raises:
        ValueError: If the format has values that float32 lacks.
    """
    if not contains(FP32, fmt):
        raise ValueError(f"operands must be numbers that float32 holds, got {brief(fmt)}")
    return max(fmt.grid.exponent, _LOWEST) if isinstance(fmt, Float) else _LOWEST


def taken_as(fmt: Format, taken: Sequence[Float]) -> Float | None:
    """The unit's format for an operand's: the same if it has it, or else the first that has every value of it."""
    return next((own for own in taken if own == fmt), None) or next((own for own in taken if contains(own, fmt)), None)


@lru_cache(maxsize=1024)
def _spelled(accumulator: Accumulator, a: Format, b: Format) -> str:
    return spell_sum(accumulator.sum_of(a, b))
