"""Which torch dtypes can carry the values of a format."""

from __future__ import annotations

import math

import torch

from qsim.formats.base import Format

#: The dtypes that tensors may have, widest last.
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Significant bits, largest value and smallest positive value of each.
_FACTS = {
    dtype: (1 - round(math.log2(facts.eps)), facts.max, facts.smallest_normal * facts.eps)
    for dtype, facts in ((dtype, torch.finfo(dtype)) for dtype in FLOATS)
}


def holds(dtype: torch.dtype, fmt: Format) -> bool:
    """Whether every value of a format is exact in a torch dtype.

    Args:
        dtype: bfloat16, float16, float32 or float64.
        fmt: The format.

    Example:
        >>> import torch
        >>> from qsim.formats import E4M3, FP16, holds
        >>> holds(torch.bfloat16, E4M3), holds(torch.bfloat16, FP16)
        (True, False)
    """
    precision, largest, smallest = _FACTS[dtype]
    # Every value is a multiple of the spacing of the lowest binade, or of the smallest value where there is no spacing below.
    step = min(fmt.grid.least, math.ldexp(1.0, fmt.grid.exponent - fmt.grid.mantissa))
    return fmt.precision <= precision and max(fmt.max, -fmt.min) <= largest and step >= smallest


def holders(fmt: Format) -> list[torch.dtype]:
    """The dtypes that can carry a format, narrowest first."""
    return [dtype for dtype in FLOATS if holds(dtype, fmt)]
