"""Rounding modes: which of its two neighbours in a format a value is rounded to.

The deterministic modes are named constants; stochastic rounding has parameters.

Example:
    >>> from qsim import rounding
    >>> rounding.resolve("nearest_away")
    NEAREST_AWAY
    >>> rounding.resolve("stochastic")
    Stochastic()
    >>> import torch, qsim
    >>> from qsim.rounding import DOWN, NEAREST, NEAREST_AWAY, NEAREST_DOWN, NEAREST_UP, ODD, TOWARD_ZERO, UP
    >>> for mode in (NEAREST, NEAREST_AWAY, NEAREST_UP, NEAREST_DOWN, TOWARD_ZERO, UP, DOWN, ODD):
    ...     print(mode, qsim.quantize(torch.tensor([0.25, -0.25, 1.2]), "e2m1", rounding=mode).tolist())
    nearest [0.0, -0.0, 1.0]
    nearest_away [0.5, -0.5, 1.0]
    nearest_up [0.5, -0.0, 1.0]
    nearest_down [0.0, -0.5, 1.0]
    toward_zero [0.0, -0.0, 1.0]
    up [0.5, -0.0, 1.5]
    down [0.0, -0.5, 1.0]
    odd [0.5, -0.5, 1.5]
    >>> rounding.NAMED["odd"] is ODD, rounding.DEFAULT_BITS, get_args(rounding.Overflow)
    (True, 32, ('saturate', 'saturate_symmetric', 'nonfinite', 'format'))
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Literal, get_args

from qsim.formats import Format
from qsim.formats.base import check_flag
from qsim.text.parsing import read_call
from qsim_kernels.numbers.grid import Mode, Overflow as OverflowRule, Rule, spell

__all__ = [
    "DEFAULT_BITS",
    "DOWN",
    "NAMED",
    "NEAREST",
    "NEAREST_AWAY",
    "NEAREST_DOWN",
    "NEAREST_UP",
    "ODD",
    "Overflow",
    "Rounding",
    "Stochastic",
    "TOWARD_ZERO",
    "UP",
    "overflow_in",
    "resolve",
]

#: How numbers beyond the largest value are handled, wherever qsim rounds: `"saturate"` sends them to the largest value, infinities too;
#: `"saturate_symmetric"` does the same, and below zero to its negative, so that integers end at -127 instead of -128; `"nonfinite"` makes
#: them infinite, or NaN in formats without infinities; `"format"` does what the format itself does: infinities if it has them, else
#: saturation. See "Overflow" in the documentation's Numerics for the defaults.
Overflow = Literal["saturate", "saturate_symmetric", "nonfinite", "format"]

#: Default number of random bits of stochastic rounding.
DEFAULT_BITS = 32


@dataclass(frozen=True)
class Rounding:
    """Base class of all roundings.

    Attributes:
        mode: The kernels' constant for the rounding.
        spelling: The rounding with each overflow mode but `"format"` as text, the form that operators take.

    Example:
        >>> import qsim
        >>> isinstance(qsim.rounding.NEAREST, qsim.rounding.Rounding), isinstance(qsim.Stochastic(bits=6), qsim.rounding.Rounding)
        (True, True)
        >>> qsim.Stochastic().is_stochastic, qsim.rounding.UP.is_stochastic
        (True, False)
    """

    mode: Mode
    spelling: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spelling", {overflow: spell(self.rule(overflow)) for overflow in get_args(Overflow)[:-1]})

    def rule(self, overflow: str) -> Rule:
        """Return the rounding and what happens on overflow, as parameters for the kernels.

        Args:
            overflow: `"saturate"`, `"saturate_symmetric"` or `"nonfinite"`.
        """
        return Rule(int(self.mode), 0, False, int(OverflowRule[overflow.upper()]))

    @property
    def is_stochastic(self) -> bool:
        """Whether random bits are drawn."""
        return self.mode == Mode.STOCHASTIC


@dataclass(frozen=True, repr=False)
class Plain(Rounding):
    """A rounding without parameters; all are constants of this module."""

    def __repr__(self) -> str:
        return self.mode.name

    def __str__(self) -> str:
        return self.mode.name.lower()


#: Ties go to the neighbour whose code ends in 0.
NEAREST = Plain(Mode.NEAREST)
#: Ties go away from zero.
NEAREST_AWAY = Plain(Mode.NEAREST_AWAY)
#: Ties go toward +infinity, as in Definition 2 of *Training with Fewer Bits*.
NEAREST_UP = Plain(Mode.NEAREST_UP)
#: Ties go toward -infinity.
NEAREST_DOWN = Plain(Mode.NEAREST_DOWN)
#: The neighbour of smaller magnitude.
TOWARD_ZERO = Plain(Mode.TOWARD_ZERO)
#: The larger neighbour.
UP = Plain(Mode.UP)
#: The smaller neighbour.
DOWN = Plain(Mode.DOWN)
#: The neighbour whose code ends in 1; between zero and the smallest normal, in formats without subnormals, the smallest normal.
ODD = Plain(Mode.ODD)


@dataclass(frozen=True, init=False, repr=False)
class Stochastic(Rounding):
    """Stochastic rounding: up with the probability that makes the mean exact, to the precision of the random bits.

    With r bits and `p` the position between the neighbours, the one of larger magnitude is taken when `R + floor(p * 2**r) >= 2**r` for a
    uniform r-bit integer `R`: with probability `floor(p * 2**r) / 2**r`, exactly. The first r of an element's 32 random bits make `R`.

    Args:
        bits: Number of random bits, 1 to 32. `None` means 32, for tensors of every dtype.
        correction: Take `floor(p * 2**r + 1/2)` instead, which removes most of the bias of few bits.

    Example:
        >>> import torch, qsim
        >>> x = torch.full((8,), 1.1)
        >>> qsim.quantize(x, "e2m1", rounding=qsim.Stochastic(bits=6), seed=1)
        tensor([1.0000, 1.5000, 1.0000, 1.5000, 1.0000, 1.0000, 1.0000, 1.0000])
    """

    bits: int | None
    correction: bool

    def __init__(self, bits: int | None = None, correction: bool = False) -> None:
        if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int)):
            raise TypeError(f"Stochastic: bits must be an int or None, got {bits!r}")
        if bits is not None and not 1 <= bits <= 32:
            raise ValueError(f"Stochastic: bits must be in 1…32, got {bits}")
        check_flag("Stochastic", "correction", correction)
        object.__setattr__(self, "mode", Mode.STOCHASTIC)
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "correction", correction)
        self.__post_init__()

    def rule(self, overflow: str) -> Rule:  # noqa: D102 (documented above)
        return Rule(int(self.mode), self.bits or DEFAULT_BITS, self.correction, int(OverflowRule[overflow.upper()]))

    def __repr__(self) -> str:
        given = [f"bits={self.bits}"] if self.bits is not None else []
        given += ["correction=True"] if self.correction else []
        return f"Stochastic({', '.join(given)})"


#: The roundings that can be given by name.
NAMED: dict[str, Rounding] = {
    **{str(plain): plain for plain in (NEAREST, NEAREST_AWAY, NEAREST_UP, NEAREST_DOWN, TOWARD_ZERO, UP, DOWN, ODD)},
    "stochastic": Stochastic(),
}


def resolve(rounding: str | Rounding) -> Rounding:
    """Resolve a name or a rounding to a rounding.

    Args:
        rounding: One of `NAMED`'s names, or a `Rounding`.

    Raises:
        TypeError: If it has the wrong type.
        ValueError: If no rounding has that name.

    Example:
        >>> from qsim import rounding
        >>> rounding.resolve("up")
        UP
    """
    if isinstance(rounding, Rounding):
        if not hasattr(rounding, "spelling"):
            raise TypeError(
                f"rounding must be a name, a mode of qsim.rounding or a Stochastic, got {type(rounding).__name__}, a subclass of Rounding "
                "without a mode: functions cannot be roundings"
            )
        return rounding
    if not isinstance(rounding, str):
        raise TypeError(f"rounding must be a name or a Rounding, got {rounding!r}")
    found: Rounding | None = NAMED.get(rounding) or read_call(rounding, {"Stochastic": Stochastic})
    if found is None:
        close = difflib.get_close_matches(rounding, NAMED, n=1)
        hint = f"did you mean {close[0]!r}? Allowed are" if close else "allowed are"
        raise ValueError(f"unknown rounding {rounding!r}: {hint} {', '.join(NAMED)} and Stochastic(bits, correction)")
    return found


def check_overflow(overflow: str) -> None:
    """Raise an error for an unknown overflow mode."""
    if overflow not in get_args(Overflow):
        *others, last = map(repr, get_args(Overflow))
        raise ValueError(f"overflow must be {', '.join(others)} or {last}, got {overflow!r}")


def overflow_in(format: Format, overflow: str) -> Overflow:
    """An overflow mode in a format: `"format"` becomes `"nonfinite"` or `"saturate"`.

    Example:
        >>> import qsim
        >>> [qsim.rounding.overflow_in(qsim.format(name), "format") for name in ("bf16", "e5m2", "e4m3", "e2m1", "int8")]
        ['nonfinite', 'nonfinite', 'saturate', 'saturate', 'saturate']
    """
    if overflow == "format":
        return "nonfinite" if format.has_inf else "saturate"
    return overflow  # type: ignore[return-value]  # one of the others
