"""A rounding to codes, in one text, and the integers in which codes are written."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from qsim_kernels.numbers.grid import Coding, Grid, Mode, Rule, read

_BAR = " | "


class Encoding(NamedTuple):
    """A rounding to codes.

    Attributes:
        grid: The values to choose from.
        rule: How to choose.
        coding: The values' codes.
    """

    grid: Grid
    rule: Rule
    coding: Coding

    @property
    def is_stochastic(self) -> bool:
        """Whether it draws random bits."""
        return self.rule.mode == Mode.STOCHASTIC


def spell_encoding(grid: str, rule: str, coding: str) -> str:
    """The text of an encoding, from those of its parts.

    Example:
        >>> spell_encoding("a grid", "a rule", "a coding")
        'a grid | a rule | a coding'
    """
    return f"{grid}{_BAR}{rule}{_BAR}{coding}"


def parts_of(text: str) -> tuple[str, str, str]:
    """The texts of an encoding's parts."""
    grid, rule, coding = text.split(_BAR)
    return grid, rule, coding


@lru_cache(maxsize=4096)
def read_encoding(text: str) -> Encoding:
    """Parse the output of `spell_encoding`.

    Example:
        >>> from qsim_kernels.numbers.grid import Coding, Rule, spell
        >>> from qsim_kernels.numbers.sums import SINGLE_GRID
        >>> how = spell_encoding(*map(spell, (SINGLE_GRID, Rule(0, 0, False, 0), Coding(32, False, -1, -1))))
        >>> read_encoding(how).is_stochastic
        False
    """
    grid, rule, coding = parts_of(text)
    return Encoding(read(Grid, grid), read(Rule, rule), read(Coding, coding))


def code_dtype(bits: int) -> torch.dtype:
    """The dtype for codes of a given width.

    Example:
        >>> code_dtype(4)
        torch.uint8
    """
    return torch.uint8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32
