"""The plain numbers that describe a format and a rounding to the kernels.

A format reaches this package as a `Grid`: the finite values that rounding chooses between, as a handful of numbers. A
`Coding` says how those values are written as bit patterns, a `Rule` how to choose between two neighbours.
"""

from __future__ import annotations

from ast import literal_eval
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from torch import Tensor


class Mode(IntEnum):
    """Rounding modes: which of its two neighbours a value goes to."""

    NEAREST = 0
    NEAREST_AWAY = 1
    NEAREST_UP = 2
    TOWARD_ZERO = 3
    UP = 4
    DOWN = 5
    ODD = 6
    STOCHASTIC = 7
    NEAREST_DOWN = 8


class Overflow(IntEnum):
    """Results for numbers beyond the largest or the smallest value of a grid.

    NONFINITE is an infinity, or NaN where there is none, if the rounding leads outward; SATURATE is that largest or smallest value;
    SATURATE_SYMMETRIC is the largest value with the number's sign, so that two's complement leaves its smallest value unused.
    """

    NONFINITE = 0
    SATURATE = 1
    SATURATE_SYMMETRIC = 2


class Grid(NamedTuple):
    """A finite set of values.

    From `2**exponent` upwards each binade holds `2**mantissa` evenly spaced values. Below it the spacing of that lowest binade continues
    down to zero if `least` is `2**(exponent - mantissa)`; otherwise `least` is `2**exponent` and there is no value between zero and it.

    Attributes:
        mantissa: log2 of the number of values in a binade.
        exponent: Exponent of the lowest binade with a spacing of its own.
        least: The smallest positive value.
        max: The largest value.
        min: The smallest value: `-max`, zero or `least` for unsigned sets, the lowest integer in two's complement.
        zero: Whether zero is in the set.
        negative_zero: Whether negative zero is in the set.
        infinity: Whether overflow may become an infinity; if not it becomes NaN.
        table: The text of a table whose values are the set, empty for the sets above; see `numbers.tables`. The other numbers then say that
            every value is a multiple of `2**(exponent - mantissa)` with at most `mantissa + 1` significant bits.
        flush: Whether magnitudes below the smallest value become zero whatever the rounding, as inputs of a unit that flushes subnormals.
    """

    mantissa: int
    exponent: int
    least: float
    max: float
    min: float
    zero: bool
    negative_zero: bool
    infinity: bool
    table: str = ""
    flush: bool = False


class Coding(NamedTuple):
    """How the values of a grid are written as bit patterns.

    Attributes:
        bits: Width of a code.
        twos_complement: Codes are integers in units of `least`; otherwise sign and magnitude.
        nan: The code of NaN, or -1 if there is none.
        infinity: The code of +infinity, or -1 if there is none.
    """

    bits: int
    twos_complement: bool
    nan: int
    infinity: int


class Rule(NamedTuple):
    """How to round a value between two neighbours, and what to do beyond the largest.

    Attributes:
        mode: A `Mode`.
        bits: Number of random bits, 1 to 32; 0 for every mode but `STOCHASTIC`.
        correction: Add half of the last random bit's weight before it is compared.
        overflow: An `Overflow`.
    """

    mode: int
    bits: int
    correction: bool
    overflow: int

    @property
    def saturates(self) -> bool:
        """Whether overflow goes to a value of the grid."""
        return self.overflow != Overflow.NONFINITE

    @property
    def leaves_zero(self) -> bool:
        """Whether some numbers round away from zero however small they are, so that none may underflow to zero before."""
        return self.mode in (Mode.UP, Mode.DOWN, Mode.ODD)


class GridRounding(NamedTuple):
    """A rounding: the values to choose from, and how to choose."""

    grid: Grid
    rule: Rule


#: The source of a tensor's random bits: the seed, a 0-d int64 tensor that only stochastic rounding needs; which of its streams; and the
#: logical index of the first element.
Noise = tuple[Tensor | None, int, int]


class NoiseNumbers(NamedTuple):
    """The source of random bits as code takes it: the seed, which of its streams, and the logical index of the first element."""

    seed: int
    stream: int
    offset: int


Numbers = TypeVar("Numbers", bound=tuple[Any, ...])
#: What separates the texts of a record's own numbers and of the records in it.
BAR = " | "
#: The words with which the texts of records begin that may be in the same place as others.
WORDS: dict[type[tuple[Any, ...]], str] = {}


def spell(record: tuple[Any, ...]) -> str:
    """Format a NamedTuple as text for operators: one argument that graphs show and exported programs keep.

    Its numbers come first, after its word in `WORDS` if it has one, and then the records in it; one that is `None` is left out.

    A number that has a default is left out where it is that.

    Example:
        >>> from qsim_kernels.numbers.grid import Coding, spell
        >>> spell(Coding(bits=8, twos_complement=True, nan=-1, infinity=-1))
        'bits=8 twos_complement=True nan=-1 infinity=-1'
    """
    fields = list(zip(_names(type(record)), record, strict=True))
    defaults = _defaults(type(record))
    spelt = [(name, value) for name, value in fields if value is not None and not isinstance(value, tuple)]
    numbers = [f"{name}={value!r}" for name, value in spelt if name not in defaults or value != defaults[name]]
    parts = [" ".join([*_word(type(record)), *numbers]), *(spell(value) for _, value in fields if isinstance(value, tuple))]
    return BAR.join(part for part in parts if part)


def _names(kind: type[tuple[Any, ...]]) -> tuple[str, ...]:
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    return names


def _word(kind: type[tuple[Any, ...]]) -> list[str]:
    """The word with which a record's text begins, if there is one."""
    return [WORDS[kind]] if kind in WORDS else []


def _defaults(kind: type[tuple[Any, ...]]) -> dict[str, Any]:
    """The last fields and what they are by default: not `_field_defaults`, which torch 2.11 cannot trace."""
    defaults: tuple[Any, ...] = kind.__new__.__defaults__ or ()
    names = _names(kind)
    return dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))


@lru_cache(maxsize=4096)
def read(kind: type[Numbers], text: str) -> Numbers:
    """Parse a record from its text.

    Args:
        kind: The NamedTuple type.
        text: The output of `spell`.

    Raises:
        ValueError: If the text does not describe such a record.

    Example:
        >>> from qsim_kernels.numbers.grid import Rule, read
        >>> read(Rule, "mode=7 bits=6 correction=False overflow=1")
        Rule(mode=7, bits=6, correction=False, overflow=1)
    """
    parts = text.split(BAR)
    record: Numbers = _taken((kind,), parts)
    if parts:
        raise ValueError(f"{kind.__name__} is spelt without {BAR.join(parts)!r}, got {text!r}")
    return record


def _taken(kinds: tuple[type[Any], ...], parts: list[str]) -> Any:
    """Read a record of one of some kinds from the first parts, and remove these."""
    head = parts[0].split(" ")
    kind = next((kind for kind in kinds if _word(kind) in ([], head[:1])), kinds[0])
    inner = records_in(kind)  # type: ignore[arg-type]
    names = [name for name in _names(kind) if name not in inner]
    values: dict[str, Any] = {}
    if names:
        pairs = [word.partition("=") for word in head[len(_word(kind)) :]]
        given, defaults = [name for name, _, _ in pairs], _defaults(kind)
        if _word(kind) not in ([], head[:1]) or given != [name for name in names if name in given or name not in defaults]:
            raise ValueError(f"{kind.__name__} is spelt {' '.join([*_word(kind), *(f'{name}=…' for name in names)])}, got {parts[0]!r}")
        values = {name: literal_eval(value) for name, _, value in pairs}
        del parts[0]
    for name, (of_field, is_optional) in inner.items():
        if not parts and not is_optional:
            raise ValueError(f"{kind.__name__} is spelt with its {name}, got none")
        values[name] = _taken(of_field, parts) if parts else None
    return kind(**values)


@lru_cache(maxsize=64)
def records_in(kind: type[tuple[Any, ...]]) -> dict[str, tuple[tuple[type[Any], ...], bool]]:
    """The fields that are records: their possible types, and whether they may be `None`."""
    choices = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}
    found = {name: tuple(each for each in given if hasattr(each, "_fields")) for name, given in choices.items()}
    return {name: (kinds, type(None) in choices[name]) for name, kinds in found.items() if kinds}
