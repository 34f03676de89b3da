"""Products of matrices with emulated accumulators, in plain torch: `arithmetic.sums` on float64 tensors, for many results at once.

Where operands have scales along the sum, these enter where a short sum is added. Such short sums come from the operator `qsim::accumulate`,
so that each device computes them as fast as any other product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.arithmetic.sums import NO_EXPONENT
from qsim_kernels.meanings import torch as meaning
from qsim_kernels.meanings.torch import float_sums
from qsim_kernels.numbers.carrier import GridBits, grid_bits
from qsim_kernels.numbers.grid import Noise, Rule
from qsim_kernels.numbers.sums import (
    SINGLE_GRID,
    AlignedSum,
    BlockScaledSum,
    Order,
    PromotedSum,
    RoundedSum,
    Sum,
    TwoStepSum,
    noise_indices,
    spell_sum,
)  # fmt: skip
from qsim_kernels.torch.chunks import CHUNK
from qsim_kernels.torch.philox import ElementNoise, key_of
from qsim_kernels.torch.rounding import one_nan, rounded


def _round_bits(bits: Tensor, drawn: ElementNoise | int | None, grid: GridBits, rule: Rule) -> Tensor:
    noise = drawn if isinstance(drawn, ElementNoise) else None
    return rounded(bits.contiguous().view(-1), grid, rule, noise).view(bits.shape)


#: The functions of `arithmetic.sums` for float64 tensors, whose adders are the descriptions in `numbers.sums`.
SUMS = meaning.sums(_round_bits)
_SINGLE = grid_bits(SINGLE_GRID, wide=True)


class Term(NamedTuple):
    """A product, or an exact sum of products, and the exponent with which it counts."""

    value: Tensor
    exponent: Tensor


class SummedOperand(NamedTuple):
    """An operand whose summed dimension comes last; `along` makes it the first.

    Attributes:
        values: Its values in float64, times their scales, unless products are added exactly first.
        exponents: The exponents of its elements, plus those of their scales; of scales only, if products are added exactly first.
        scales: The scales of products that are added exactly first.
    """

    values: Tensor
    exponents: Tensor
    scales: Tensor | None = None

    def along(self, other: int) -> SummedOperand:
        """Put the summed dimension first, and a dimension of size 1 where the other operand has its rows or columns."""
        values, exponents, scales = (None if x is None else x.movedim(-1, 0).unsqueeze(other).contiguous() for x in self)
        assert values is not None
        assert exponents is not None
        return SummedOperand(values, exponents, scales)

    def part(self, start: int, size: int) -> SummedOperand:
        """Some places of the summed dimension, which is the first."""
        return SummedOperand(self.values[start : start + size], self.exponents[start : start + size])


def operand_of(x: Tensor, adder: Sum, low: int, scales: Tensor | None = None) -> SummedOperand:
    """The values and the exponents of an operand.

    Args:
        x: The operand, `[…, lines, length]`.
        adder: The sum.
        low: The exponent of the smallest normal number in the operand's format.
        scales: Those of a `BlockScaledSum`, `[…, lines, groups]`, if there are some.
    """
    values = x.detach().to(torch.float64)
    if not isinstance(adder, BlockScaledSum):
        return SummedOperand(values, _exponents_of(values, low))
    if scales is None:
        scales = x.new_ones((*x.shape[:-1], -(-x.shape[-1] // adder.group)), dtype=torch.float64)
        of_scales = torch.zeros_like(scales, dtype=torch.int64)
    else:
        scales = scales.detach().to(torch.float64)
        of_scales = _exponents_of(scales, adder.low_scale)
    if adder.exact:
        return SummedOperand(values, of_scales, scales)
    factors, of_scales = (y.repeat_interleave(adder.group, -1)[..., : x.shape[-1]] for y in (scales, of_scales))
    return SummedOperand(values * factors, _exponents_of(values, low) + of_scales)


def _exponents_of(x: Tensor, low: int) -> Tensor:
    exponents: Tensor = SUMS.exponent_unless_zero(x.contiguous().view(torch.int64), low, NO_EXPONENT)
    return exponents


def accumulate_into(out: Tensor, a: Tensor, b: Tensor, adder: Sum, noise: Noise, scales: tuple[Tensor, Tensor] | None = None) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]`; see `qsim_kernels.numbers.sums`.

    Args:
        out: The result, contiguous, of float32 or float64.
        a: The left matrices.
        b: The right matrices.
        adder: The sum.
        noise: The random bits.
        scales: Those of a `BlockScaledSum`, `[…, M, groups]` and `[…, N, groups]`, if its operands have some.
    """
    (seed, stream, offset), rows, columns, length = noise, a.shape[-2], b.shape[-1], a.shape[-1]
    count = math.prod(a.shape[:-2])  # torch does not allow -1 for matrices without elements
    left, right, target = a.reshape(count, rows, length), b.reshape(count, length, columns).mT, out.view(count, rows, columns)
    p, q = (None, None) if scales is None else (x.reshape(count, -1, x.shape[-1]) for x in scales)
    inner = adder.inner if isinstance(adder, PromotedSum) else adder
    for batches, lines in _parts(*target.shape):
        piece, at = target[batches, lines], (batches, lines)
        x = operand_of(left[at], adder, inner.low_a, None if p is None else p[at]).along(3)
        y = operand_of(right[batches], adder, inner.low_b, None if q is None else q[batches]).along(2)
        drawn = None
        if seed is not None:
            first = (batches.start * rows + lines.start) * columns
            where = torch.arange(first, first + piece.numel(), device=a.device) * noise_indices(adder, length) + offset
            drawn = ElementNoise(key_of(seed, a), stream, where, piece.numel(), a.device)
        total = x.values.new_zeros(piece.shape)
        piece.copy_(one_nan(_sum(total, x, y, adder, drawn).to(out.dtype)))


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


def _sum(zero: Tensor, a: SummedOperand, b: SummedOperand, adder: Sum, noise: ElementNoise | None) -> Tensor:
    """The sums of products of operands whose summed dimension is the first."""
    result: Tensor
    match adder:
        case PromotedSum():
            count = noise_indices(adder.inner, adder.every)
            parts = [(i, a.part(k, adder.every), b.part(k, adder.every)) for i, k in enumerate(range(0, len(a.values), adder.every))]
            sums = (_sum(zero, x, y, adder.inner, _behind(noise, i * count)) for i, x, y in parts)
            result = SUMS.promoted_sum(zero, sums, _SINGLE, adder)
        case AlignedSum():
            result = SUMS.aligned_sum(zero, _steps(_products(a, b), adder.block), grid_bits(adder.grid, wide=True), adder)
        case TwoStepSum():
            terms = (Term(SUMS.infinite_beyond(x.view(torch.int64)).view(torch.float64), e) for x, e in _products(a, b))
            result = SUMS.two_step_sum(zero, _steps(terms, adder.block), _SINGLE, adder)
        case BlockScaledSum():
            steps = _steps(_groups(a, b, adder.group), adder.block // adder.group) if adder.exact else _steps(_products(a, b), adder.block)
            result = SUMS.aligned_sum(zero, steps, _SINGLE, adder.aligned)
        case RoundedSum():
            result = _rounded(zero, a, b, adder, noise)
    return result


def _steps(terms: Iterator[Term], count: int) -> Iterator[list[Term]]:
    while step := list(itertools.islice(terms, count)):
        yield step


def _products(a: SummedOperand, b: SummedOperand) -> Iterator[Term]:
    for x, y, of_x, of_y in zip(a.values, b.values, a.exponents, b.exponents, strict=True):
        yield Term(x * y, of_x + of_y)


def _groups(a: SummedOperand, b: SummedOperand, group: int) -> Iterator[Term]:
    """The exact sums of groups of products, times their scales."""
    assert a.scales is not None
    assert b.scales is not None
    for i, (p, q, of_p, of_q) in enumerate(zip(a.scales, b.scales, a.exponents, b.exponents, strict=True)):
        places = slice(i * group, (i + 1) * group)
        value = (a.values[places] * b.values[places]).sum(0)
        yield Term(value * (p * q), torch.where(value == 0, NO_EXPONENT, of_p + of_q))


def _rounded(zero: Tensor, a: SummedOperand, b: SummedOperand, adder: RoundedSum, noise: ElementNoise | None) -> Tensor:
    """Sums that are rounded after each term."""
    grid = grid_bits(adder.grid, wide=True)

    def draw(index: int) -> ElementNoise | None:
        return _behind(noise, index)

    terms, result = _terms(zero, a, b, adder, draw), zero
    match adder.order:
        case Order.PAIRWISE:
            if len(a.values):
                result = SUMS.tree_sum(terms, draw, grid, adder)
        case Order.KAHAN:
            result = SUMS.kahan_sum(zero, terms, draw, grid, adder)
        case Order.SEQUENTIAL:
            result = SUMS.rounded_sum(zero, terms, draw, grid, adder)
    return result


def _terms(
    zero: Tensor, a: SummedOperand, b: SummedOperand, adder: RoundedSum, draw: Callable[[int], ElementNoise | None]
) -> Iterator[Tensor]:
    if adder.chunk > 1:
        for start in range(0, len(a.values), adder.chunk):
            yield _sum(zero, a.part(start, adder.chunk), b.part(start, adder.chunk), adder.chunk_sum, None)
        return
    for index, (x, y) in enumerate(zip(a.values, b.values, strict=True)):
        term = x * y
        if adder.product is not None and adder.product_rule is not None:
            bits = _round_bits(
                term.view(torch.int64), draw(index * adder.roundings), grid_bits(adder.product, wide=True), adder.product_rule
            )
            term = bits.view(torch.float64)
        yield term


def _behind(noise: ElementNoise | None, count: int) -> ElementNoise | None:
    """The random bits behind the next `count` ones of each element."""
    return None if noise is None else noise._replace(where=noise.where + count)


class ChainScales(NamedTuple):
    """The scales of an operand.

    Attributes:
        values: Float32, of lines (rows of the left operand or columns of the right one) and of short sums: `[…, lines, sums]`.
        lines: The number of neighbouring lines that share a scale.
        sums: The number of consecutive short sums that share one.
    """

    values: Tensor
    lines: int
    sums: int

    def of_sum(self, index: int, count: int) -> Tensor:
        """The scales of all `count` lines in one short sum."""
        scales = self.values[..., index // self.sums]
        return scales if self.lines == 1 else scales.repeat_interleave(self.lines, -1)[..., :count]

    def whole(self, count: int, sums: int) -> Tensor:
        """The scales of all `count` lines in each short sum: `[…, count, sums]`."""
        scales = self.values.repeat_interleave(self.sums, -1)[..., :sums]
        return scales.repeat_interleave(self.lines, -2)[..., :count, :]


def accumulate_scaled_into(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scales: tuple[ChainScales, ChainScales],
    adder: PromotedSum,
    noise: Noise,
    chip: str,
) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]` that have scales.

    Args:
        out: The result, float32.
        a: The left matrices.
        b: The right matrices.
        scales: The scales of both operands.
        adder: The sum.
        noise: The random bits.
        chip: Whether the chip itself may compute the short sums.
    """
    total, inner, (of_a, of_b), (seed, stream, offset) = torch.zeros_like(out), spell_sum(adder.inner), scales, noise
    each = out.numel() * noise_indices(adder.inner, adder.every)
    for i, start in enumerate(range(0, a.shape[-1], adder.every)):
        left, right = a[..., start : start + adder.every], b[..., start : start + adder.every, :]
        short = torch.ops.qsim.accumulate.default(left, right, seed, inner, stream, offset + i * each, None, chip)
        scale = of_a.of_sum(i, a.shape[-2])[..., :, None] * of_b.of_sum(i, b.shape[-1])[..., None, :]
        # Both factors are float32 numbers, so that their product is exact.
        total = float_sums.add_to_odd(total.to(torch.float64), scale.to(torch.float64) * short.to(torch.float64)).to(torch.float32)
    out.copy_(one_nan(total))
