"""The operator that multiplies matrices with an emulated accumulator, in loops compiled by Numba; see `qsim_kernels.reference.sums`."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.carrier import plan
from qsim_kernels.compiled.sum_loops import NONE, Course, Onto, Unit, aligned_loop, rounded_loop
from qsim_kernels.compiled.threads import in_parts
from qsim_kernels.compiled.two_step_loop import Steps, two_step_loop
from qsim_kernels.grid import Grid, Mode, Rule
from qsim_kernels.reference import sums as reference
from qsim_kernels.reference.rounding import one_nan
from qsim_kernels.sums import (
    SINGLE_GRID,
    Aligned,
    BlockScaled,
    Promoted,
    Rounded,
    Sum,
    TwoStep,
    chunk_sum,
    is_stochastic,
    noise_indices,
    roundings_per_term,
)  # fmt: skip


def accumulate_into(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    seed: Tensor | None,
    how: Sum,
    stream: int,
    offset: int,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]`; see `reference.sums.accumulate_into`."""
    if not out.numel() or not a.shape[-1]:
        out.zero_()
        return
    if isinstance(how, BlockScaled) and how.exact:
        reference.accumulate_into(out, a, b, seed, how, stream, offset, scales)
        return
    if isinstance(how, (BlockScaled, TwoStep)):
        _in_unit(out, a, b, how, scales)
        return
    rows, columns, length = a.shape[-2], b.shape[-1], a.shape[-1]
    result, every = out.view(-1, columns), how.every if isinstance(how, Promoted) else 0
    inner = how.inner if isinstance(how, Promoted) else how
    unit = inner if isinstance(inner, Aligned) else chunk_sum(inner)
    is_aligned = isinstance(inner, Aligned) or inner.chunk > 1
    left = _as_double(a).reshape(-1, length)
    right = _as_double(b.mT).reshape(-1, columns, length) if is_aligned else _as_double(b).reshape(-1, length, columns)
    if is_aligned:
        exponents = [_exponents(left, unit.low_a), _exponents(right, unit.low_b)]
    else:
        exponents = [torch.empty(1, 0, dtype=torch.int16), torch.empty(1, columns, 0, dtype=torch.int16)]
    # Rounded sums are written as float64 for any dtype of the result, so that their loop is compiled once.
    sums = result if isinstance(inner, Aligned) or result.dtype == torch.float64 else torch.empty_like(result, dtype=torch.float64)
    arrays = [x.numpy() for x in (sums, left, right, *exponents)]
    if isinstance(inner, Aligned):
        numbers = _unit(inner)
        in_parts(lambda first, count: aligned_loop(*arrays, first, count, rows, every, numbers), len(left), columns * length)
    else:
        course = _course(inner, is_stochastic(how))
        short = noise_indices(inner, every) if every else 0
        random = (0 if seed is None else int(seed), stream, offset, noise_indices(how, length), short)
        in_parts(lambda first, count: rounded_loop(*arrays, first, count, rows, every, course, random), len(left), columns * length)
    result.copy_(sums)
    out.copy_(one_nan(out))


def _in_unit(out: Tensor, a: Tensor, b: Tensor, how: BlockScaled | TwoStep, scales: tuple[Tensor, Tensor] | None) -> None:
    """Sums whose operands contain their scales, if they have some: factors of the values, whose exponents are added."""
    rows, columns, length = a.shape[-2], b.shape[-1], a.shape[-1]
    operands, exponents = [_as_double(a), _as_double(b.mT)], []
    for i, low in enumerate((how.low_a, how.low_b)):
        exponents.append(_exponents(operands[i], low))
        if scales is not None:
            assert isinstance(how, BlockScaled)
            factors = _as_double(scales[i]).repeat_interleave(how.group, -1)[..., :length]
            exponents[i] += _exponents(factors, how.low_scale)
            operands[i] = operands[i] * factors
    shapes, result = ((-1, length), (-1, columns, length)), out.view(-1, columns)
    arrays = [result.numpy(), *(x.reshape(shape).numpy() for x, shape in zip((*operands, *exponents), shapes * 2, strict=True))]
    if isinstance(how, TwoStep):
        steps = Steps(how.block, how.fraction, how.second, how.apart)
        in_parts(lambda first, count: two_step_loop(*arrays, first, count, rows, steps), len(result), columns * length)
    else:
        unit = _unit(Aligned(SINGLE_GRID, int(Mode.TOWARD_ZERO), how.block, how.fraction, how.low_a, how.low_b))
        in_parts(lambda first, count: aligned_loop(*arrays, first, count, rows, 0, unit), len(result), columns * length)
    out.copy_(one_nan(out))


def _as_double(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64).contiguous()


def _exponents(x: Tensor, low: int) -> Tensor:
    """The exponents of numbers, at least `low`; that of infinities and NaN does not matter."""
    found = (x.view(torch.int64) >> 52 & 0x7FF) - 1023
    found = torch.where(x.isfinite(), found, low).clamp_(min=low)
    return torch.where(x == 0, NONE, found).to(torch.int16)


@lru_cache(maxsize=256)
def _onto(grid: Grid, rule: Rule) -> Onto:
    how = plan(grid, wide=True)
    patterns = how.shift, how.low, how.least, how.half, how.parity, how.top, how.bottom, how.floor, how.over, how.under
    return Onto(*patterns, how.scale, how.signed, how.negative_zero, how.zero, rule.mode, rule.bits, rule.correction, rule.saturate)


@lru_cache(maxsize=256)
def _unit(how: Aligned) -> Unit:
    end = math.ldexp(1.0, math.frexp(how.grid.max)[1])
    return Unit(_onto(how.grid, Rule(how.mode, 0, correction=False, saturate=False)), end, how.grid.exponent, how.block, how.fraction)


@lru_cache(maxsize=256)
def _course(how: Rounded, draws: bool) -> Course:
    onto, product = _onto(how.grid, how.rule), None
    if how.product is not None and how.product_rule is not None:
        product = _onto(how.product, how.product_rule)
    unit, each = _unit(chunk_sum(how)), roundings_per_term(how)
    return Course(onto, product or onto, product is not None, unit, how.chunk, how.order, each, draws)
