"""The sums of matrix units in plain torch: products that are aligned to the largest exponent among them, and truncated.

IEEE's arithmetic on infinities and NaN, as float64 has it, gives what is defined for them. Adding +0 makes +0 of -0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.numbers.carrier import grid_bits
from qsim_kernels.numbers.grid import Grid, Mode, Overflow, Rule
from qsim_kernels.numbers.sums import LEAST_EXPONENT, SINGLE_GRID, AlignedSum, BlockScaledSum, TwoStepSum
from qsim_kernels.torch.rounding import rounded

#: The exponent of zero, below those of all products; and that of a sum of no products, from which all numbers are whole.
_NONE, _LEAST_PRODUCT = -4096, -300
_RUNNING = SINGLE_GRID.exponent


class Operands(NamedTuple):
    """The operands of a product, with the summed dimension first: `[K, batch, M, 1]` and `[K, batch, 1, N]`, in float64.

    Attributes:
        a: The left operand.
        b: The right one.
        scales: Their scales, with groups of products in place of products, if they have some.
    """

    a: Tensor
    b: Tensor
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """The number of products in a sum."""
        return self.a.shape[0]

    def part(self, start: int, size: int) -> Operands:
        """Products of a part of the sum."""
        return Operands(self.a[start : start + size], self.b[start : start + size])

    def zeros(self) -> Tensor:
        """A zero for every sum."""
        return self.a.new_zeros((self.a.shape[1], self.a.shape[2], self.b.shape[3]))


class Term(NamedTuple):
    """A product, or an exact sum of products, and the exponent with which it counts."""

    value: Tensor
    exponent: Tensor


def aligned(operands: Operands, how: AlignedSum) -> Tensor:
    """A sum of aligned and truncated products."""
    total = operands.zeros()
    for start in range(0, operands.length, how.block):
        terms = list(_products(operands.part(start, how.block), how.low_a, how.low_b))
        total = _limited(_added_to(total, terms, how.fraction, how.grid.exponent), how.grid, how.mode)
    return total + 0.0


def block_scaled(operands: Operands, how: BlockScaledSum) -> Tensor:
    """The same with scales of groups of products."""
    total = operands.zeros()
    for start in range(0, operands.length, how.block):
        groups = range(start, min(start + how.block, operands.length), how.group)
        terms = [term for first in groups for term in _scaled(operands, first, how)]
        total = _limited(_added_to(total, terms, how.fraction, _RUNNING), SINGLE_GRID, Mode.TOWARD_ZERO)
    return total + 0.0


def two_step(operands: Operands, how: TwoStepSum) -> Tensor:
    """A sum whose products are added before the running sum."""
    total = operands.zeros()
    for start in range(0, operands.length, how.block):
        terms = list(_products(operands.part(start, how.block), how.low_a, how.low_b))
        # A last block may consist of a single product.
        parts = [_together(part, how.fraction) for part in ((terms[::2], terms[1::2]) if how.apart else (terms,)) if part]
        top = _largest(*(part.exponent for part in parts))
        units = sum((torch.floor(part.value * _power(how.fraction - top)) for part in parts), operands.zeros())
        products = units * _power(top - how.fraction)
        running = exponents_of(total, _RUNNING, of_zero=_RUNNING)
        top = torch.maximum(top, running)
        kept = torch.floor(total * _power(how.fraction - top)) * _power(top - how.fraction)
        if how.apart:
            kept = torch.where((running < top - how.fraction - 1) & total.isfinite(), 0.0, kept)
        found = torch.floor(products * _power(how.second - top)) * _power(top - how.second) + kept
        total = _onto(found + 0.0, SINGLE_GRID, Mode.NEAREST)
    return total


def _together(terms: list[Term], fraction: int) -> Term:
    """Terms that are truncated and added exactly, and their largest exponent."""
    top = _largest(*(term.exponent for term in terms)).clamp(min=_LEAST_PRODUCT)
    units = torch.zeros_like(terms[0].value)
    for term in terms:
        value = torch.where(term.value.abs() >= 2.0**128, term.value * math.inf, term.value)
        units = units + torch.trunc(value * _power(fraction - top))
    return Term(units * _power(top - fraction), top)


def _products(operands: Operands, low_a: int, low_b: int) -> Iterator[Term]:
    """The products of a part of the sum."""
    exponents_a, exponents_b = exponents_of(operands.a, low_a), exponents_of(operands.b, low_b)
    for a, b, of_a, of_b in zip(operands.a, operands.b, exponents_a, exponents_b, strict=True):
        yield Term(a * b, of_a + of_b)


def _scaled(operands: Operands, first: int, how: BlockScaledSum) -> Iterator[Term]:
    """The products of a group times its scales, or the sum of these."""
    part = operands.part(first, how.group)
    if how.exact:
        value = (part.a * part.b).sum(0)
        terms = [Term(value, torch.where(value == 0, _NONE, 0))]
    else:
        terms = list(_products(part, how.low_a, how.low_b))
    if operands.scales is None:
        yield from terms
        return
    p, q = (x[first // how.group] for x in operands.scales)
    exponent = exponents_of(p, how.low_scale) + exponents_of(q, how.low_scale)
    for term in terms:
        yield Term(term.value * (p * q), term.exponent + exponent)


def _added_to(total: Tensor, terms: list[Term], fraction: int, low: int) -> Tensor:
    """A running sum and terms, aligned to the largest exponent among them, truncated and added exactly."""
    top = _largest(exponents_of(total, low, of_zero=LEAST_EXPONENT), *(term.exponent for term in terms))
    up, down = _power(fraction - top), _power(top - fraction)
    units = torch.zeros_like(total) + torch.trunc(total * up)
    for term in terms:
        units += torch.trunc(term.value * up)
    return units * down


def _largest(*found: Tensor) -> Tensor:
    return reduce(torch.maximum, found)


def exponents_of(x: Tensor, low: int, of_zero: int = _NONE) -> Tensor:
    """The exponents of numbers, at least `low`; that of infinities and NaN does not matter."""
    found = (x.view(torch.int64) >> 52 & 0x7FF) - 1023
    found = torch.where(x.isfinite(), found, low).clamp_(min=low)
    return torch.where(x == 0, of_zero, found)


def _power(exponent: Tensor) -> Tensor:
    return (exponent + 1023 << 52).view(torch.float64)


def _limited(x: Tensor, grid: Grid, mode: int) -> Tensor:
    """Round the sums of a block onto the grid; from its next value on, they are infinite."""
    end = math.ldexp(1.0, math.frexp(grid.max)[1])
    return torch.where(x.abs() >= end, x * math.inf, _onto(x, grid, mode))


def _onto(x: Tensor, grid: Grid, mode: int) -> Tensor:
    rule = Rule(int(mode), 0, False, int(Overflow.NONFINITE))
    return rounded(x.contiguous().view(-1).view(torch.int64), grid_bits(grid, wide=True), rule, None).view(torch.float64).view(x.shape)
