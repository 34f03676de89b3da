"""A rounding as the loops take it: the loop for a strip of elements, and the address of its numbers."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from qsim_kernels.carrier import SINGLE, GridBits
from qsim_kernels.compiled.jobs import kept_address
from qsim_kernels.compiled.native import Native
from qsim_kernels.grid import Mode, Rule
from qsim_kernels.reference.rounding import rounds_by_addition

_NEAREST, _SPACED = Native("strips", "nearest", 7), Native("strips", "nearest_spaced", 7)
_DETERMINISTIC, _STOCHASTIC = Native("strips", "deterministic", 7), Native("strips", "stochastic", 7)
_IN_GENERAL, _BY_ADDITION, _BY_STEPS = 0, 1, 2  # as in `loops.strips`
#: Random bits that are drawn first.
_FIRST = 16
_NEVER = 2**31 - 1


class Masks(NamedTuple):
    """A rounding without random bits, as masks (0 or -1) and limits for values above and below zero.

    With `ones` for the bits that are rounded away, and `last` for the bit above them, what is added before they are cleared is the sum of
    `ones >> 1`, `ones`, `last` and 1, each if its mask allows it. A magnitude below the smallest value becomes that value if it is larger
    than a limit, and zero otherwise.

    Attributes:
        half: Whether to add `ones >> 1`.
        even: Whether to add `last`.
        odd: Whether to add `ones` where `last` is zero.
        ones_above: Whether to add `ones`.
        ones_below: The same.
        one_above: Whether to add 1.
        one_below: The same.
        limit_above: The limit.
        limit_below: The same.
        inward_above: Whether the rounding never goes past the largest value from a finite one.
        inward_below: The same.
    """

    half: int = 0
    even: int = 0
    odd: int = 0
    ones_above: int = 0
    ones_below: int = 0
    one_above: int = 0
    one_below: int = 0
    limit_above: int = _NEVER
    limit_below: int = _NEVER
    inward_above: int = 0
    inward_below: int = 0


def _masks(mode: int, half: int) -> Masks:
    """The masks of a mode, given the bits of half the smallest value."""
    near, before = Masks(half=-1), half - 1
    match mode:
        case Mode.NEAREST:
            return near._replace(even=-1, limit_above=half, limit_below=half)
        case Mode.NEAREST_AWAY:
            return near._replace(one_above=-1, one_below=-1, limit_above=before, limit_below=before)
        case Mode.NEAREST_UP:
            return near._replace(one_above=-1, limit_above=before, limit_below=half)
        case Mode.UP:
            return Masks(ones_above=-1, limit_above=0, inward_below=-1)
        case Mode.DOWN:
            return Masks(ones_below=-1, limit_below=0, inward_above=-1)
        case Mode.ODD:
            return Masks(odd=-1, limit_above=0, limit_below=0)
    return Masks(inward_above=-1, inward_below=-1)


class Strip(NamedTuple):
    """A rounding of strips.

    Attributes:
        loop: Address of the loop.
        how: Address of its numbers.
    """

    loop: int
    how: int


@cache
def strip(how: GridBits, rule: Rule) -> Strip:
    """The rounding onto a grid in float32's bits."""
    masks = _masks(rule.mode, how.half)
    if not how.zero:
        masks = masks._replace(limit_above=-1, limit_below=-1)
    ends = how.top, how.bottom, how.floor, how.over, how.under
    flags = how.signed, how.negative_zero, how.zero, rule.saturate, rule.bits, rule.correction
    numbers = how.shift, how.low, how.least, *ends, *flags, how.parity, *masks, _way(how, rule)
    return Strip(_loop(how, rule).address, kept_address(numbers))


def _loop(how: GridBits, rule: Rule) -> Native:
    if rule.mode == Mode.STOCHASTIC:
        return _STOCHASTIC
    if rule.mode != Mode.NEAREST or not how.negative_zero:
        return _DETERMINISTIC
    if rounds_by_addition(how, rule):
        return _NEAREST
    is_spaced = not how.low and not how.least and how.signed and how.top == how.bottom
    return _SPACED if is_spaced and (rule.saturate or how.is_open) else _DETERMINISTIC


def _way(how: GridBits, rule: Rule) -> int:
    """The fastest way to round stochastically onto a grid; see `loops.strips`."""
    is_symmetric = how.signed and how.negative_zero and how.top == how.bottom
    if not is_symmetric or rule.correction:
        return _IN_GENERAL
    if not how.least and how.shift <= _FIRST and (rule.saturate or how.is_open):
        return _BY_ADDITION
    if not rule.saturate:
        return _IN_GENERAL
    mantissa = SINGLE.mantissa - how.shift
    is_even = how.zero and how.low > mantissa and how.least == how.low - mantissa << SINGLE.mantissa
    # Positions must fit an int32, and what they are computed with a float32.
    return _BY_STEPS if is_even and mantissa + _FIRST < 30 and how.low > mantissa + _FIRST else _IN_GENERAL
