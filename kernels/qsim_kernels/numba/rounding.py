"""A rounding as the loops take it: the loop for a strip of elements, and the address of its numbers."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

from qsim_kernels.numba.jobs import FEW_STEPS, LoopRounding, RoundingNumbers, kept_address
from qsim_kernels.numba.native import Native
from qsim_kernels.numbers.carrier import SINGLE, SYMMETRIC, GridBits, bits_that_matter, name_of, used_bits, variant_of
from qsim_kernels.numbers.grid import Mode, Rule
from qsim_kernels.numbers.tables import read_table
from qsim_kernels.torch.rounding import rounds_by_addition
from qsim_kernels.torch.tables import rounding_table

_CPU = torch.device("cpu")


@cache
def strip(grid: GridBits, rule: Rule) -> LoopRounding:
    """The rounding of strips onto a grid in float32's bits."""
    loop = Native("strips", _faster(grid, rule) or name_of(variant_of(grid, rule)), 7)
    return LoopRounding(loop.address, kept_address((*numbers(grid, rule), bits_that_matter(grid, rule) <= 16)))


def _faster(grid: GridBits, rule: Rule) -> str | None:
    """The loop that is a faster way to the same results, if there is one; see `loops.strips`."""
    if rounds_by_addition(grid, rule) and grid.negative_zero:
        return "nearest_by_addition"
    if grid.table:
        return _faster_table(grid, rule)
    if variant_of(grid, rule) != SYMMETRIC or rule.correction:
        return None
    mantissa = SINGLE.mantissa - grid.shift
    is_even = grid.low > mantissa and grid.least == grid.low - mantissa << SINGLE.mantissa
    # Positions must fit an int32, and what they are computed with a float32.
    return "stochastic_by_steps" if is_even and mantissa + 16 < 30 and grid.low > mantissa + 16 else None


def _faster_table(grid: GridBits, rule: Rule) -> str | None:
    """The loop for stochastic rounding onto a small table whose differences are normal numbers of float32."""
    variant, values = variant_of(grid, rule), read_table(grid.table).values
    fits = max(map(abs, values)) < 2.0**120 and min(b - a for a, b in pairwise(values)) > 2.0**-100
    is_small = variant.table <= FEW_STEPS and rule.mode == Mode.STOCHASTIC and not rule.correction
    return f"approximately_{name_of(variant)}" if is_small and fits else None


@cache
def row(kind: str, grid: GridBits, rule: Rule) -> LoopRounding:
    """The rounding of rows of float64 numbers, with an addition before it or without; see `loops.doubles`."""
    return LoopRounding(Native("doubles", f"{kind}_{name_of(variant_of(grid, rule))}", 6).address, kept_address(numbers(grid, rule)))


def numbers(grid: GridBits, rule: Rule) -> RoundingNumbers:
    """The numbers of a rounding onto a grid."""
    table = rounding_table(grid, rule, _CPU).data_ptr() if grid.table else 0
    return RoundingNumbers(grid.numbers(table), used_bits(grid.carrier, bits_that_matter(grid, rule), rule.correction))
