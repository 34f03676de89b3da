"""Products of matrices with emulated accumulators, in plain torch: the definition of `qsim_kernels.numbers.sums`, one step after the other.

Everything is computed in float64, which holds products of float32 numbers exactly. A sum of two numbers is rounded to odd there: the
last of its 53 bits is set if the sum is not exact. Rounding that to fewer bits gives what rounding the exact sum would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.numbers.carrier import grid_bits
from qsim_kernels.numbers.grid import Grid, Mode, Rule
from qsim_kernels.numbers.sums import (
    AlignedSum,
    BlockScaledSum,
    Order,
    PromotedSum,
    RoundedSum,
    Sum,
    TwoStepSum,
    chunk_sum,
    noise_indices,
    roundings_per_term,
)
from qsim_kernels.torch.chunks import CHUNK
from qsim_kernels.torch.philox import ElementNoise
from qsim_kernels.torch.rounding import one_nan, rounded
from qsim_kernels.torch.units import Operands, aligned, block_scaled, two_step


class ElementBits(NamedTuple):
    """The random bits of a result's elements: the seed's stream, and the index of the next bits of each element."""

    seed: int
    stream: int
    where: Tensor

    def after(self, count: int) -> ElementBits:
        """The bits behind the next `count` ones."""
        return self._replace(where=self.where + count)


def accumulate_into(
    out: Tensor, a: Tensor, b: Tensor, seed: Tensor | None, how: Sum, stream: int, offset: int, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]`; see `qsim_kernels.numbers.sums`.

    Args:
        out: The result, contiguous, of float32 or float64.
        a: The left matrices.
        b: The right matrices.
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        how: The sum.
        stream: Which of the seed's streams of random bits to use.
        offset: Logical index of the first random number.
        scales: Those of a `BlockScaledSum`, `[…, M, groups]` and `[…, N, groups]`, if its operands have some.
    """
    rows, columns, length = a.shape[-2], b.shape[-1], a.shape[-1]
    count = math.prod(a.shape[:-2])  # torch does not allow -1 for matrices without elements
    left, right, target = a.reshape(count, rows, length), b.reshape(count, length, columns), out.view(count, rows, columns)
    held = None if scales is None else tuple(x.reshape(count, -1, x.shape[-1]) for x in scales)
    number, stride = None if seed is None else int(seed), noise_indices(how, length)
    for batches, lines in _parts(*target.shape):
        piece = target[batches, lines]
        first = (batches.start * rows + lines.start) * columns
        operands = Operands(_summed_first(left[batches, lines].mT).unsqueeze(3), _summed_first(right[batches]).unsqueeze(2))
        if held is not None:
            of_rows, of_columns = _summed_first(held[0][batches, lines].mT), _summed_first(held[1][batches].mT)
            operands = operands._replace(scales=(of_rows.unsqueeze(3), of_columns.unsqueeze(2)))
        where = torch.arange(first, first + piece.numel(), device=a.device) * stride + offset
        found = _sum(operands, how, None if number is None else ElementBits(number, stream, where))
        piece.copy_(one_nan(found.to(out.dtype)))


def _parts(batches: int, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Consecutive parts of a result that fit the caches: several whole matrices, or rows of one."""
    if not batches * rows * columns:
        return
    if rows * columns <= CHUNK:
        step = CHUNK // (rows * columns)
        for start in range(0, batches, step):
            yield slice(start, min(start + step, batches)), slice(0, rows)
        return
    step = max(1, CHUNK // columns)
    for batch in range(batches):
        for start in range(0, rows, step):
            yield slice(batch, batch + 1), slice(start, min(start + step, rows))


def _summed_first(x: Tensor) -> Tensor:
    return x.movedim(1, 0).to(torch.float64).contiguous()


def _sum(operands: Operands, how: Sum, bits: ElementBits | None) -> Tensor:
    match how:
        case PromotedSum():
            return _promoted(operands, how, bits)
        case AlignedSum():
            return aligned(operands, how)
        case TwoStepSum():
            return two_step(operands, how)
        case BlockScaledSum():
            return block_scaled(operands, how)
        case RoundedSum():
            return _rounded(operands, how, bits)


def _promoted(operands: Operands, how: PromotedSum, bits: ElementBits | None) -> Tensor:
    total, count = operands.zeros().to(torch.float32), noise_indices(how.inner, how.every)
    for i, start in enumerate(range(0, operands.length, how.every)):
        inner = _sum(operands.part(start, how.every), how.inner, None if bits is None else bits.after(i * count))
        total += inner.to(torch.float32)
    return total.to(torch.float64)


def _rounded(operands: Operands, how: RoundedSum, bits: ElementBits | None) -> Tensor:
    """A sum that is rounded after each term."""
    total, each = operands.zeros(), roundings_per_term(how)

    def drawn(index: int) -> ElementBits | None:
        return None if bits is None else bits.after(index)

    def onto(x: Tensor, index: int) -> Tensor:
        return _onto(x, how.grid, how.rule, drawn(index))

    terms = _terms(operands, how, drawn)
    match how.order:
        case Order.PAIRWISE:
            return _in_a_tree(terms, onto, each) if operands.length else total
        case Order.KAHAN:
            return _compensated(terms, onto, each, total)
    for j, term in enumerate(terms):
        total = onto(sum_to_odd(total, term), (j + 1) * each - 1)
    return total


def _terms(operands: Operands, how: RoundedSum, drawn: Callable[[int], ElementBits | None]) -> Iterator[Tensor]:
    each = roundings_per_term(how)
    if how.chunk > 1:
        for start in range(0, operands.length, how.chunk):
            yield aligned(operands.part(start, how.chunk), chunk_sum(how))
        return
    for j in range(operands.length):
        term = operands.a[j] * operands.b[j]
        if how.product is not None and how.product_rule is not None:
            term = _onto(term, how.product, how.product_rule, drawn(j * each))
        yield term


def _in_a_tree(terms: Iterator[Tensor], onto: Callable[[Tensor, int], Tensor], each: int) -> Tensor:
    """Add neighbours, then sums of neighbours. Sums wait until one of as many terms has joined them."""
    waiting: list[tuple[int, int, Tensor]] = []  # the first term of each sum, the number of its terms, its value

    def join() -> None:
        (first, size, left), (middle, more, right) = waiting[-2:]
        waiting[-2:] = [(first, size + more, onto(sum_to_odd(left, right), middle * each - 1))]

    for j, term in enumerate(terms):
        waiting.append((j, 1, onto(term, j * each + each - 2)))
        while len(waiting) > 1 and waiting[-1][1] == waiting[-2][1]:
            join()
    while len(waiting) > 1:
        join()
    return waiting[0][2]


def _compensated(terms: Iterator[Tensor], onto: Callable[[Tensor, int], Tensor], each: int, total: Tensor) -> Tensor:
    """Kahan's sum: what an addition loses is taken off the next term."""
    lost = torch.zeros_like(total)
    for j, term in enumerate(terms):
        first = (j + 1) * each - 4
        due = onto(sum_to_odd(term, -lost), first)
        after = onto(sum_to_odd(total, due), first + 1)
        gained = onto(sum_to_odd(after, -total), first + 2)
        lost = torch.where(after.isfinite(), onto(sum_to_odd(gained, -due), first + 3), 0.0)
        total = after
    return total


def sum_to_odd(x: Tensor, y: Tensor) -> Tensor:
    """The sum of float64 tensors, rounded to odd."""
    near = x + y
    from_y = near - x
    rest = (x - (near - from_y)) + (y - from_y)
    bits, missing = near.view(torch.int64), (rest != 0) & near.isfinite()
    is_beyond = missing & ((rest.view(torch.int64) ^ bits) < 0)
    return ((bits - is_beyond.to(torch.int64)) | missing.to(torch.int64)).view(torch.float64)


def _onto(x: Tensor, grid: Grid, rule: Rule, bits: ElementBits | None) -> Tensor:
    """Round float64 numbers onto a grid."""
    noise = None
    if rule.mode == Mode.STOCHASTIC:
        assert bits is not None  # the operator asks for a seed
        noise = ElementNoise(bits.seed, bits.stream, bits.where, x.numel(), x.device)
    patterns = x.contiguous().view(-1).view(torch.int64)
    return rounded(patterns, grid_bits(grid, wide=True), rule, noise).view(torch.float64).view(x.shape)
