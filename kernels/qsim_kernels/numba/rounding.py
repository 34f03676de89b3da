"""A rounding as the loops take it: the loop for a strip of elements, and the address of its numbers."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from qsim_kernels.numba.jobs import kept_address
from qsim_kernels.numba.native import Native
from qsim_kernels.numbers.carrier import SINGLE, SYMMETRIC, GridBits, bits_that_matter, name_of, used_bits, variant_of
from qsim_kernels.numbers.grid import Rule
from qsim_kernels.torch.rounding import rounds_by_addition


class LoopRounding(NamedTuple):
    """A rounding.

    Attributes:
        loop: Address of the loop.
        grid: Address of its numbers.
    """

    loop: int
    grid: int


@cache
def strip(how: GridBits, rule: Rule) -> LoopRounding:
    """The rounding of strips onto a grid in float32's bits."""
    loop = Native("strips", _faster(how, rule) or name_of(variant_of(how, rule)), 7)
    return LoopRounding(loop.address, kept_address((*numbers(how, rule), bits_that_matter(how, rule) <= 16)))


def _faster(how: GridBits, rule: Rule) -> str | None:
    """The loop that is a faster way to the same results, if there is one; see `loops.strips`."""
    if rounds_by_addition(how, rule) and how.negative_zero:
        return "nearest_by_addition"
    if variant_of(how, rule) != SYMMETRIC or rule.correction:
        return None
    mantissa = SINGLE.mantissa - how.shift
    is_even = how.low > mantissa and how.least == how.low - mantissa << SINGLE.mantissa
    # Positions must fit an int32, and what they are computed with a float32.
    return "stochastic_by_steps" if is_even and mantissa + 16 < 30 and how.low > mantissa + 16 else None


@cache
def row(kind: str, how: GridBits, rule: Rule) -> LoopRounding:
    """The rounding of rows of float64 numbers, with an addition before it or without; see `loops.doubles`."""
    return LoopRounding(Native("doubles", f"{kind}_{name_of(variant_of(how, rule))}", 6).address, kept_address(numbers(how, rule)))


def numbers(how: GridBits, rule: Rule) -> tuple[int, ...]:
    """A `GridNumbers` and a `UsedBits` in a row."""
    return *how.numbers, *used_bits(how.carrier, bits_that_matter(how, rule), rule.correction)
