"""The operator that multiplies matrices with an emulated accumulator, in loops compiled by Numba; see `qsim_kernels.torch.sums`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from qsim_kernels.numba.jobs import ProductJob, job_address, packed
from qsim_kernels.numba.rounding import row
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numba.units import ALIGNED, add_in_unit, aligned_numbers, as_double, exponents_of
from qsim_kernels.numbers.carrier import grid_bits
from qsim_kernels.numbers.sums import (
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
from qsim_kernels.torch.rounding import one_nan

_ROUNDED = Loop("sums", "rounded")
#: The most elements that are computed together, and rows of numbers that are kept for them, as in `loops.sums`.
_WIDTH, _ROWS = 128, 7 + 64
#: The most random numbers that are drawn for them at once.
_NUMBERS = 1 << 15
#: Elements that share a block of random bits.
_SERVED = 8
_CPU = torch.device("cpu")
_EMPTY = torch.empty(0, dtype=torch.int16, device=_CPU)


def accumulate_into(
    out: Tensor, a: Tensor, b: Tensor, seed: Tensor | None, how: Sum, stream: int, offset: int, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]`; see `reference.sums.accumulate_into`."""
    rows, columns, length = a.shape[-2], b.shape[-1], a.shape[-1]
    if not out.numel() or not length:
        out.zero_()
        return
    if isinstance(how, (BlockScaledSum, TwoStepSum)):
        add_in_unit(out, a, b, how, scales)
        return
    inner, every = (how.inner, how.every) if isinstance(how, PromotedSum) else (how, 0)
    unit = inner if isinstance(inner, AlignedSum) else chunk_sum(inner)
    is_aligned = isinstance(inner, AlignedSum) or inner.chunk > 1
    left, right = as_double(a), as_double(b.mT if is_aligned else b)
    of_left, of_right = (exponents_of(left, unit.low_a), exponents_of(right, unit.low_b)) if is_aligned else (_EMPTY, _EMPTY)
    result = out if out.dtype == torch.float64 else torch.empty_like(out, dtype=torch.float64)
    operands = left.data_ptr(), right.data_ptr(), of_left.data_ptr(), of_right.data_ptr()
    count, row, numbers = left.numel() // length, columns * length, aligned_numbers(unit)
    product = ProductJob(result.data_ptr(), *operands, rows, columns, length, every, job_address(numbers))
    if isinstance(inner, AlignedSum):
        ALIGNED.share(packed(product), count, row)
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


@cache
def _rounded_numbers(how: RoundedSum) -> bytes:
    product = 0, 0
    if how.product is not None and how.product_rule is not None:
        product = row(grid_bits(how.product, wide=True), how.product_rule)
    return packed((*row(grid_bits(how.grid, wide=True), how.rule), *product, how.chunk, how.order, roundings_per_term(how)))
