"""The operator that multiplies matrices with an emulated accumulator, in loops compiled by Numba; see `qsim_kernels.reference.sums`."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.carrier import plan
from qsim_kernels.compiled.sum_loops import NONE, Course, Onto, Unit, aligned_loop, rounded_loop
from qsim_kernels.compiled.threads import in_parts
from qsim_kernels.grid import Grid, Rule
from qsim_kernels.reference import sums as reference
from qsim_kernels.reference.rounding import one_nan
from qsim_kernels.sums import PLAIN, Aligned, Promoted, Rounded, Sum, chunk_sum, is_stochastic, noise_indices, roundings_per_term


def accumulate_into(out: Tensor, a: Tensor, b: Tensor, seed: Tensor | None, how: Sum, stream: int, offset: int) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]`; see `reference.sums.accumulate_into`."""
    if not out.numel() or not a.shape[-1]:
        out.zero_()
        return
    if isinstance(how, PLAIN):
        reference.accumulate_into(out, a, b, seed, how, stream, offset)
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
