"""Which torch dtypes can hold the values of a format."""

from __future__ import annotations

import math

import torch

from qsim.formats.base import Format
from qsim.formats.floating import Float
from qsim_kernels.numbers.grid import Grid, read
from qsim_kernels.private import constant

#: The dtypes that tensors may have, widest last.
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Significant bits, largest value and smallest positive value of each.
_FACTS = {
    dtype: (1 - round(math.log2(facts.eps)), facts.max, facts.smallest_normal * facts.eps)
    for dtype, facts in ((dtype, torch.finfo(dtype)) for dtype in FLOATS)
}


def holds(dtype: torch.dtype, fmt: str | torch.dtype | Format) -> bool:
    """Whether every value of a format is exact in a torch dtype.

    Args:
        dtype: bfloat16, float16, float32 or float64.
        fmt: The format.

    Example:
        >>> import torch
        >>> from qsim.formats import holds
        >>> holds(torch.bfloat16, "e4m3"), holds(torch.bfloat16, "fp16")
        (True, False)
    """
    return _fits(_resolved(fmt).spelling[0], dtype)


def contains(outer: str | torch.dtype | Float, fmt: str | torch.dtype | Format) -> bool:
    """Whether every value of a format is also a value of a floating-point format.

    Args:
        outer: A signed format that has subnormals.
        fmt: The format.

    Example:
        >>> from qsim.formats import E5M2, FP16, TF32, contains
        >>> contains(TF32, FP16), contains(E5M2, FP16)
        (True, False)
    """
    return _fits(_resolved(fmt).spelling[0], _resolved(outer).spelling[0])


def holders(fmt: str | torch.dtype | Format) -> list[torch.dtype]:
    """Dtypes that can hold a format, narrowest first.

    Example:
        >>> import qsim
        >>> qsim.formats.holders(qsim.formats.E4M3)
        [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    """
    return [dtype for dtype in FLOATS if holds(dtype, fmt)]


def _resolved(fmt: str | torch.dtype | Format) -> Format:
    if isinstance(fmt, Format):
        return fmt
    from qsim.formats.names import format  # imports formats that import this file

    return format(fmt)


def _fits(spelt: str, outer: torch.dtype | str) -> bool:
    """Whether every value of a grid is a value of a dtype or of another grid."""
    known = _ANSWERS.get((spelt, outer))
    if known is None:
        known = _ANSWERS[spelt, outer] = _compare(read(Grid, spelt), outer)
    return known


# With dynamic shapes, torch.compile would turn a format's numbers into variables. Strings stay constants, and so does the result of a
# function marked like this. torch.compiler.assume_constant_result does the same, but imports the compiler.
constant(_fits)

_ANSWERS: dict[tuple[str, torch.dtype | str], bool] = {}


def _compare(grid: Grid, outer: torch.dtype | str) -> bool:
    if isinstance(outer, str):
        other = read(Grid, outer)
        precision, largest, smallest = other.mantissa + 1, other.max, other.least
    else:
        precision, largest, smallest = _FACTS[outer]
    # Every value is a multiple of the spacing of the lowest binade, or of the smallest value where there is no spacing below.
    step = min(grid.least, math.ldexp(1.0, grid.exponent - grid.mantissa))
    significant = min(grid.mantissa + 1, math.frexp(grid.max / step)[1])  # the latter for integers
    return bool(significant <= precision and max(grid.max, -grid.min) <= largest and step >= smallest)
