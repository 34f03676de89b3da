"""Launches of the operator that multiplies matrices with an emulated accumulator: which kernel, with which numbers, on which planes.

Sums without a kernel use the reference: pairwise ones, those of four random numbers next to a rounded product, and random numbers that do
not begin at a multiple of eight.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from qsim_kernels.meanings.triton import INTERPRETED
from qsim_kernels.numbers.carrier import DOUBLE, grid_bits
from qsim_kernels.numbers.grid import Grid, Mode, Overflow, Rule
from qsim_kernels.numbers.sums import (
    SINGLE_GRID,
    AlignedSum,
    BlockScaledSum,
    Order,
    PromotedSum,
    RoundedSum,
    Sum,
    TwoStepSum,
    chunk_sum,
    is_single,
    is_stochastic,
    noise_indices,
    roundings_per_term,
)  # fmt: skip
from qsim_kernels.numbers.updates import own_grid
from qsim_kernels.torch import sums as reference
from qsim_kernels.triton.accumulate.call import AccumulateCall, ResultTile, has_dpx, options
from qsim_kernels.triton.accumulate.chunked_sums import chained_kernel, chunked_kernel
from qsim_kernels.triton.accumulate.planes import planes
from qsim_kernels.triton.accumulate.rounded_sums import RoundedVariant, rounded_kernel
from qsim_kernels.triton.accumulate.units import launch_aligned, launch_block_scaled, launch_two_step, unit_of
from qsim_kernels.triton.device.values import KernelVariant
from qsim_kernels.triton.host import arguments

#: Bits of float32 to which a sum must be rounded at most, and the smallest step, so that two more bits are left for rounding to odd.
_MOST_MANTISSA, _LEAST_STEP = 21, 2.0**-147
#: Conversions of float32 that round to nearest, and the grids of their results.
_NATIVE = ((own_grid(torch.bfloat16), tl.bfloat16), (own_grid(torch.float16), tl.float16))
#: Dtypes whose values a matrix unit of an H100 takes as bfloat16, or as float16.
_AS_BFLOAT16 = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_AS_FLOAT16 = (torch.float16, *_AS_BFLOAT16[1:])
_CHUNK_UNIT = (9, 0)
#: Matrices of one launch: CUDA's limit for the last dimension of a grid.
_MOST_BATCHES = 65535
#: Mantissa bits of a grid whose values have zeros in the lower halves of their float64 patterns.
_MOST_STOCHASTIC = 19


def accumulate_into(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    seed: Tensor | None,
    how: Sum,
    stream: int,
    offset: int,
    scales: tuple[Tensor, Tensor] | None = None,
    tile: ResultTile | None = None,
) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]`; see `reference.sums.accumulate_into`.

    Args:
        out: The result, contiguous, of float32 or float64.
        a: The left matrices.
        b: The right matrices.
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        how: The sum.
        stream: Which of the seed's streams of random bits to use.
        offset: Logical index of the first random number.
        scales: Those of a `BlockScaledSum`, `[…, M, groups]` and `[…, N, groups]`, if its operands have some.
        tile: The size of a program's tile; by default the fastest.
    """
    if not out.numel() or not a.shape[-1]:
        out.zero_()
        return
    if not _has_kernel(how, offset):
        reference.accumulate_into(out, a, b, seed, how, stream, offset)
        return
    rows, columns, length = a.shape[-2], b.shape[-1], a.shape[-1]
    left, right, result = a.reshape(-1, rows, length), b.reshape(-1, length, columns), out.view(-1, rows, columns)
    factors = None if scales is None else tuple(x.reshape(-1, *x.shape[-2:]) for x in scales)
    for start in range(0, len(result), _MOST_BATCHES):
        part = slice(start, start + _MOST_BATCHES)
        first = offset + start * rows * columns * noise_indices(how, length)
        own = None if factors is None else (factors[0][part], factors[1][part])
        with nullcontext() if INTERPRETED else torch.cuda.device(a.device):
            _launch(AccumulateCall(result[part], left[part], right[part], own, seed, stream, first, tile), how)


def _launch(call: AccumulateCall, how: Sum) -> None:
    inner = how.inner if isinstance(how, PromotedSum) else how
    match inner:
        case AlignedSum():
            launch_aligned(call, how, inner)
        case TwoStepSum():
            launch_two_step(call, inner)
        case BlockScaledSum():
            launch_block_scaled(call, inner)
        case RoundedSum(chunk=1):
            _launch_rounded(call, how, inner)
        case RoundedSum():
            _launch_chunks(call, how, inner)


def _has_kernel(how: Sum, offset: int) -> bool:
    inner = how.inner if isinstance(how, PromotedSum) else how
    if not isinstance(inner, RoundedSum):
        return True
    return inner.order != Order.PAIRWISE and (not is_stochastic(how) or (offset % 8 == 0 and roundings_per_term(inner) in (1, 2, 4)))


def _launch_rounded(call: AccumulateCall, how: Sum, inner: RoundedSum) -> None:
    rounding = _rounding(inner, is_stochastic(how), isinstance(how, PromotedSum))
    sum_variant = rounding.sum_variant
    tile = call.tile or (ResultTile(2, 32, 1) if sum_variant.roundings else ResultTile(8, 128, 1))
    dtype = torch.float64 if sum_variant.wide else torch.float32
    a, b = planes(call.a, dtype, tile.rows), planes(call.b.mT, dtype, tile.columns)
    every = how.every if isinstance(how, PromotedSum) else call.length
    room = call.room(a, b)
    rounded_kernel[call.programs(tile)](
        a.values, b.values, room, *call.noise(how), call.rows, call.columns, a.rows, b.rows, call.length, every, *rounding.numbers,
        *rounding.product_numbers, sum_variant, *rounding.variants, tile.rows, tile.columns, **options(tile.warps),
    )  # fmt: skip
    call.finish(room)


def _launch_chunks(call: AccumulateCall, how: Sum, inner: RoundedSum) -> None:
    rounding = _rounding(inner, is_stochastic(how), isinstance(how, PromotedSum))
    held = _unit_dtype(call.a, call.b, inner)
    if held is not None:
        _launch_on_unit(call, how, inner, rounding, held)
        return
    tile = call.tile or ResultTile(8, 64, 1)
    summed, is_wide = chunk_sum(inner), torch.zeros(1, dtype=torch.int32, device=call.a.device)
    unit, _, _ = unit_of(summed, False, 1, False, has_dpx())
    a = planes(call.a, torch.float64, tile.rows, summed.block, summed.low_a, is_wide)
    b = planes(call.b.mT, torch.float64, tile.columns, summed.block, summed.low_b, is_wide)
    blocks, chunk = -(-call.length // summed.block), inner.chunk // summed.block
    every = how.every // summed.block if isinstance(how, PromotedSum) else blocks
    room = call.room(a, b)
    chained_kernel[call.programs(tile)](
        a.values, b.values, a.exponents, b.exponents, room, *call.noise(how), call.rows, call.columns, a.rows, b.rows, a.length,
        blocks, chunk, every, *rounding.numbers, rounding.sum_variant, rounding.variants[0], unit, tile.rows, tile.columns,
        **options(tile.warps),
    )  # fmt: skip
    call.finish(room)


def _launch_on_unit(call: AccumulateCall, how: Sum, inner: RoundedSum, rounding: RoundedArguments, held: torch.dtype) -> None:
    a, b = call.a.to(held), call.b.to(held)
    step = min(128, inner.chunk & -inner.chunk)
    tile = call.tile or _tile_on_unit(inner.chunk, rounding.sum_variant)
    even = call.rows % tile.rows == 0 and call.columns % tile.columns == 0 and call.length % inner.chunk == 0
    every = how.every if isinstance(how, PromotedSum) else call.length
    down, across, batches = call.programs(tile)
    chunked_kernel[(down * across, 1, batches)](
        a, b, call.out, *call.noise(how), call.rows, call.columns, call.length, every, a.stride(0), a.stride(1), a.stride(2), b.stride(0),
        b.stride(1), b.stride(2), *rounding.numbers, rounding.sum_variant, rounding.variants[0], inner.chunk, step, tile.rows,
        tile.columns, 8, even, num_warps=tile.warps, num_stages=3,
    )  # fmt: skip


class RoundedArguments(NamedTuple):
    """The numbers of a rounded sum: compile-time, and those of its roundings: that of sums, then that of products."""

    sum_variant: RoundedVariant
    variants: tuple[KernelVariant, KernelVariant]
    numbers: tuple[int, ...]
    product_numbers: tuple[int, ...]


def _tile_on_unit(chunk: int, sum_variant: RoundedVariant) -> ResultTile:
    if sum_variant.wide:
        return ResultTile(64, 64, 4)
    if chunk >= 128:
        return ResultTile(128, 128, 8)
    return ResultTile(64, 128, 4)


@lru_cache(maxsize=256)
def _rounding(how: RoundedSum, draws: bool, promoted: bool) -> RoundedArguments:
    pairs = [(how.grid, how.rule)]
    if how.product is not None and how.product_rule is not None:
        pairs.append((how.product, how.product_rule))
    wide = draws or not is_single(how) or not all(_rounds_in_single(grid, rule) for grid, rule in pairs)
    own, product = pairs[0], pairs[-1]
    sum_variant = RoundedVariant(
        native=_native(*own, wide),
        fast=_is_fast(*own, wide),
        products=len(pairs) > 1,
        native_product=_native(*product, wide),
        fast_product=_is_fast(*product, wide),
        kahan=how.order == Order.KAHAN,
        wide=wide,
        roundings=roundings_per_term(how) if draws else 0,
        promoted=promoted,
        unroll=4,
    )
    (variant, numbers), (product_variant, product_numbers) = arguments.rounding(*own, wide), arguments.rounding(*product, wide)
    return RoundedArguments(sum_variant, (variant, product_variant), numbers, product_numbers)


def _rounds_in_single(grid: Grid, rule: Rule) -> bool:
    """Whether rounding to odd in float32 comes before this rounding without changing its result, or float32's own addition does it."""
    if grid_bits(grid, wide=False).carrier == DOUBLE:
        return False
    step = min(grid.least, math.ldexp(1.0, grid.exponent - grid.mantissa))
    return _is_native(grid, rule, SINGLE_GRID) or (grid.mantissa <= _MOST_MANTISSA and step >= _LEAST_STEP)


def _is_native(grid: Grid, rule: Rule, own: Grid) -> bool:
    return grid == own and rule.mode == Mode.NEAREST and not rule.saturates


def _native(grid: Grid, rule: Rule, wide: bool) -> Any:
    """The dtype whose conversion from the carrier is a rounding, if there is one."""
    if wide:
        return None
    # The interpreter's conversions to 16 bits do not all round to nearest.
    known = ((SINGLE_GRID, tl.float32), *(() if INTERPRETED else _NATIVE))
    return next((language for own, language in known if _is_native(grid, rule, own)), None)


def _is_fast(grid: Grid, rule: Rule, wide: bool) -> bool:
    """Whether adding and subtracting a power of two rounds to a symmetric grid."""
    saturating, _ = arguments.rounding(grid, rule._replace(overflow=int(Overflow.SATURATE)), wide)
    if wide:
        is_even = grid_bits(grid, wide=True).low > 0 and saturating.symmetric and saturating.signed
        return rule.mode == Mode.STOCHASTIC and is_even and grid.mantissa <= _MOST_STOCHASTIC
    return saturating.fast and saturating.symmetric and (rule.saturates or rule.mode == Mode.NEAREST)


def _unit_dtype(a: Tensor, b: Tensor, how: RoundedSum) -> torch.dtype | None:
    """The dtype in which this GPU's own matrix unit computes the sums of chunks; None if it does not."""
    if INTERPRETED or torch.cuda.get_device_capability(a.device) != _CHUNK_UNIT:
        return None
    for held, taken, low in ((torch.bfloat16, _AS_BFLOAT16, -126), (torch.float16, _AS_FLOAT16, -14)):
        if how.low_a == how.low_b == low and a.dtype in taken and b.dtype in taken:
            return held
    return None
