"""The operator that multiplies matrices with an emulated accumulator, in loops compiled by Numba; see `qsim_kernels.reference.sums`."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.carrier import double_bits, grid_bits
from qsim_kernels.compiled.jobs import job_address, kept_address, packed
from qsim_kernels.compiled.native import Native
from qsim_kernels.compiled.threads import Loop
from qsim_kernels.grid import Grid, Mode, Rule
from qsim_kernels.reference import sums as reference
from qsim_kernels.reference.rounding import one_nan
from qsim_kernels.sums import (
    SINGLE_GRID,
    AlignedSum,
    BlockScaledSum,
    PromotedSum,
    RoundedSum,
    Sum,
    TwoStepSum,
    chunk_sum,
    noise_indices,
    roundings_per_term,
)  # fmt: skip

_ALIGNED, _ROUNDED = Loop("sums", "aligned"), Loop("sums", "rounded")
_TWO_STEP = Loop("two_step", "two_step")
_ONTO = {mode: Native("doubles", mode.name.lower(), 4) for mode in Mode}
#: The most elements that are computed together, and rows of numbers that are kept for them, as in `loops.sums`.
_WIDTH, _ROWS = 128, 7 + 64
#: The most random numbers that are drawn for them at once.
_NUMBERS = 1 << 15
#: Elements that share a block of random bits.
_SERVED = 8
#: The exponent of zero, below those of all products.
_NONE = -4096
_CPU = torch.device("cpu")
_EMPTY = torch.empty(0, dtype=torch.int16, device=_CPU)


class ProductJob(NamedTuple):
    """A product of matrices, in the order in which `loops.sums` reads it; addresses are 0 where there is nothing.

    Attributes:
        out: Address of the results, `[batch * rows, columns]`, float64, as all numbers.
        a: Address of the left matrices, `[batch * rows, length]`.
        b: Address of the right ones, `[batch, length, columns]`, or transposed.
        exponents_a: Address of the exponents of `a`, int16, where products are aligned.
        exponents_b: The same for `b`.
        rows: The number of rows of a matrix.
        columns: The number of columns of the result.
        length: The number of products in a sum.
        every: The number of products in a short sum; 0 for one sum that is not promoted.
        unit: Address of `loops.sums.AlignedParameters`.
        rounded: Address of `loops.sums.RoundedParameters`.
        seed: Of the random bits.
        stream: Which of the seed's streams.
        offset: Index of the first.
        stride: The number of random bits' indices that belong to an element; 0 if nothing is drawn.
        inner: The number of them that belong to a short sum.
        width: The number of elements of a row that are computed together.
        room: Address of room for numbers, for each part.
        words: The room of one part, in 64-bit words.
        part: Rows of a part.
    """

    out: int
    a: int
    b: int
    exponents_a: int
    exponents_b: int
    rows: int
    columns: int
    length: int
    every: int
    unit: int
    rounded: int = 0
    seed: int = 0
    stream: int = 0
    offset: int = 0
    stride: int = 0
    inner: int = 0
    width: int = 0
    room: int = 0
    words: int = 0
    part: int = 0


def accumulate_into(
    out: Tensor, a: Tensor, b: Tensor, seed: Tensor | None, how: Sum, stream: int, offset: int, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]`; see `reference.sums.accumulate_into`."""
    rows, columns, length = a.shape[-2], b.shape[-1], a.shape[-1]
    if not out.numel() or not length:
        out.zero_()
        return
    if isinstance(how, BlockScaledSum) and how.exact:
        reference.accumulate_into(out, a, b, seed, how, stream, offset, scales)
        return
    if isinstance(how, (BlockScaledSum, TwoStepSum)):
        _in_unit(out, a, b, how, scales)
        return
    inner, every = (how.inner, how.every) if isinstance(how, PromotedSum) else (how, 0)
    unit = inner if isinstance(inner, AlignedSum) else chunk_sum(inner)
    is_aligned = isinstance(inner, AlignedSum) or inner.chunk > 1
    left, right = _as_double(a), _as_double(b.mT if is_aligned else b)
    of_left, of_right = (_exponents(left, unit.low_a), _exponents(right, unit.low_b)) if is_aligned else (_EMPTY, _EMPTY)
    result = out if out.dtype == torch.float64 else torch.empty_like(out, dtype=torch.float64)
    operands = left.data_ptr(), right.data_ptr(), of_left.data_ptr(), of_right.data_ptr()
    count, row, numbers = left.numel() // length, columns * length, _aligned_numbers(unit)
    product = ProductJob(result.data_ptr(), *operands, rows, columns, length, every, job_address(numbers))
    if isinstance(inner, AlignedSum):
        _ALIGNED.share(packed(product), count, row)
    else:
        stride, short = noise_indices(how, length), noise_indices(inner, every) if every else 0
        width, threads = min(columns, max(1, _NUMBERS // max(stride, 1)), _WIDTH), torch.get_num_threads()
        words, part, own = _ROWS * _WIDTH + stride * width + _SERVED, -(-count // threads), _rounded_numbers(inner)
        room = torch.empty(threads * words, dtype=torch.int64, device=_CPU)
        random = 0 if seed is None else int(seed), stream, offset, stride, short
        product = ProductJob(*product[:10], job_address(own), *random, width, room.data_ptr(), words, part)
        _ROUNDED.share(packed(product), count, row, part)
    if result is not out:
        out.copy_(result)
    out.copy_(one_nan(out))


def _in_unit(out: Tensor, a: Tensor, b: Tensor, how: BlockScaledSum | TwoStepSum, scales: tuple[Tensor, Tensor] | None) -> None:
    """Sums whose operands contain their scales, if they have some: factors of the values, whose exponents are added."""
    rows, columns, length = a.shape[-2], b.shape[-1], a.shape[-1]
    operands, exponents = [_as_double(a), _as_double(b.mT)], []
    for i, low in enumerate((how.low_a, how.low_b)):
        exponents.append(_exponents(operands[i], low))
        if scales is not None:
            assert isinstance(how, BlockScaledSum)
            factors = _as_double(scales[i]).repeat_interleave(how.group, -1)[..., :length]
            exponents[i] += _exponents(factors, how.low_scale)
            operands[i] = (operands[i] * factors).contiguous()
    result = torch.empty_like(out, dtype=torch.float64)
    if isinstance(how, TwoStepSum):
        loop, unit = _TWO_STEP, packed((how.block, how.fraction, how.second, how.apart))
    else:
        loop, unit = (
            _ALIGNED,
            _aligned_numbers(AlignedSum(SINGLE_GRID, int(Mode.TOWARD_ZERO), how.block, how.fraction, how.low_a, how.low_b)),
        )
    where = [x.data_ptr() for x in (*operands, *exponents)]
    product = ProductJob(result.data_ptr(), where[0], where[1], where[2], where[3], rows, columns, length, 0, job_address(unit))
    loop.share(packed(product), operands[0].numel() // length, columns * length)
    out.copy_(result)
    out.copy_(one_nan(out))


def _as_double(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64).contiguous()


def _exponents(x: Tensor, low: int) -> Tensor:
    """The exponents of numbers, at least `low`; that of infinities and NaN does not matter."""
    found = (x.view(torch.int64) >> 52 & 0x7FF) - 1023
    found = torch.where(x.isfinite(), found, low).clamp_(min=low)
    return torch.where(x == 0, _NONE, found).to(torch.int16)


@cache
def _onto(grid: Grid, rule: Rule) -> tuple[int, ...]:
    how = grid_bits(grid, wide=True)
    patterns = how.shift, how.low, how.least, how.half, how.parity, how.top, how.bottom, how.floor, how.over, how.under
    return *patterns, double_bits(how.scale), how.signed, how.negative_zero, how.zero, rule.bits, rule.correction, rule.saturate


@cache
def _aligned_numbers(how: AlignedSum) -> bytes:
    end = math.ldexp(1.0, math.frexp(how.grid.max)[1])
    onto = _onto(how.grid, Rule(how.mode, 0, correction=False, saturate=False))
    return packed((how.mode == Mode.NEAREST, double_bits(end), how.grid.exponent, how.block, how.fraction, *onto))


@cache
def _rounded_numbers(how: RoundedSum) -> bytes:
    product = 0, 0
    if how.product is not None and how.product_rule is not None:
        product = _rounding(how.product, how.product_rule)
    return packed((*_rounding(how.grid, how.rule), *product, how.chunk, how.order, roundings_per_term(how)))


def _rounding(grid: Grid, rule: Rule) -> tuple[int, int]:
    """The addresses of the loop that rounds rows and of its numbers."""
    return _ONTO[Mode(rule.mode)].address, kept_address(_onto(grid, rule))
