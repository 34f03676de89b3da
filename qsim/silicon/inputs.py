"""Inputs that show errors of roundings: all, the corners of a format, and random ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim.formats import FP32, Format
from qsim.silicon.circuits import Circuit

#: Formats of up to so many bits have all their codes among the inputs.
EXHAUSTIVE_BITS = 16
#: How many values at each end of a binade are corners, where a format has more.
_ENDS = 2
#: Formats of more bits have only the ends of binades among the corners.
_LISTED_BITS = 10

#: Fractions with few ones or few zeros, at either end: sums of two are the fractions of Berkeley TestFloat.
_FRACTION_BITS = 23
_EXPONENT_WEIGHTS = ((0xFF, 0), (0xFF, 0), (0x7F, 0x40), (0x3F, 0x60), (0x1F, 0x70), (0x0F, 0x78), (0x07, 0x7C))


def codes(circuit: Circuit, count: int, generator: torch.Generator) -> Tensor:
    """The inputs of a circuit: all if their format has at most 16 bits, else corners and random ones.

    Args:
        circuit: The circuit.
        count: How many random inputs there are.
        generator: Where they are drawn from.
    """
    if circuit.input.bits <= EXHAUSTIVE_BITS:
        return torch.arange(1 << circuit.input.bits)
    if circuit.input != FP32:
        # The codes of wider formats are those of float32 or of integers, whose ends and carries are at both ends of their range.
        ends = torch.arange(1 << _ENDS)
        drawn = torch.randint(0, 1 << circuit.input.bits, (count,), generator=generator)
        given = torch.cat([ends, ((1 << circuit.input.bits) - 1) - ends, drawn])
    else:
        given = torch.cat([corners(circuit.format), weighted(count, generator)])
    return _distinct(given)


def _distinct(given: Tensor) -> Tensor:
    """Each number once, in order."""
    distinct: Tensor = given.unique()
    return distinct


def corners(fmt: Format) -> Tensor:
    """Float32's bits at which roundings to a format change, and those next to them, of either sign.

    These are the values at the ends of each binade and the midpoints between them, subnormal values, the thresholds of underflow and
    overflow, zeros, infinities, NaN with several payloads, and numbers whose rounding carries into the next binade.
    """
    values = [*_magnitudes(fmt), abs(fmt.min)]
    following = [*values[1:-1], _after(fmt.max, fmt), _after(abs(fmt.min), fmt)]
    between = [(a + b) / 2 for a, b in zip(values, following, strict=True)]
    points = torch.tensor([*values, *between, *following[-2:], fmt.smallest / 2, fmt.smallest / 4], dtype=torch.float64)
    points = points[points <= torch.finfo(torch.float32).max].float().view(torch.int32).long()
    near = torch.cat([points + step for step in (-2, -1, 0, 1, 2)]).clamp(0, 0x7F800000)
    special = torch.tensor(
        [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FC12345, 0x7FFFFFFF]
    )
    powers = torch.arange(0, 256) << 23
    magnitudes = torch.cat([near, special, powers, powers | 0x7FFFFF, powers | 0x400000])
    return _distinct(torch.cat([magnitudes, magnitudes | 1 << 31]))


def _after(value: float, fmt: Format) -> float:
    """The next value above the largest, if exponents had no bound."""
    return value + math.ldexp(1.0, max(math.frexp(value)[1] - 1, fmt.grid.exponent) - fmt.grid.mantissa) if value else fmt.smallest


def _magnitudes(fmt: Format) -> list[float]:
    """Magnitudes of a format: all, or the first and last of each binade and of the subnormal values."""
    if fmt.bits <= _LISTED_BITS:
        return sorted({abs(value) for value in fmt.values()})
    grid = fmt.grid
    whole = 1 << grid.mantissa
    numbers = [*range(_ENDS), *range(max(_ENDS, whole - _ENDS), whole)]
    step = math.ldexp(1.0, grid.exponent - grid.mantissa)
    values = {0.0, grid.max, grid.least}
    if grid.least < math.ldexp(1.0, grid.exponent):
        values |= {k * step for k in numbers} | {math.ldexp(step, k) for k in range(grid.mantissa)}
    while whole * step <= grid.max:
        values |= {(whole + k) * step for k in numbers if (whole + k) * step <= grid.max}
        step *= 2
    return sorted(values)


def weighted(count: int, generator: torch.Generator) -> Tensor:
    """Random float32 bits with the weights of Berkeley TestFloat.

    Half of the exponents are special ones; the others are near that of 1 in steps, or any. Three quarters of the fractions are sums of two
    with few ones or few zeros, the others any.
    """

    def draw(high: int) -> Tensor:
        return torch.randint(0, high, (count,), generator=generator)

    special = torch.tensor(
        [0x00, 0x01, 0x02, 0x40, 0x70, 0x7B, 0x7C, 0x7D, 0x7E, 0x7F, 0x80, 0x81, 0x82, 0x83, 0x8A, 0xC0, 0xFD, 0xFE, 0xFF]
    )
    masks, offsets = torch.tensor(_EXPONENT_WEIGHTS).T
    row = draw(len(_EXPONENT_WEIGHTS))
    exponents = torch.where(draw(2) == 0, special[draw(len(special))], (draw(256) & masks[row]) + offsets[row])
    ones = (1 << _FRACTION_BITS) - 1
    patterns = [1 << k for k in range(_FRACTION_BITS)] + [(1 << k) - 1 for k in range(_FRACTION_BITS + 1)]
    patterns += [ones ^ pattern for pattern in patterns]
    few = torch.tensor(patterns)
    fractions = torch.where(draw(4) < 3, (few[draw(len(few))] + few[draw(len(few))]) & ones, draw(ones + 1))
    return draw(2) << 31 | exponents << _FRACTION_BITS | fractions
