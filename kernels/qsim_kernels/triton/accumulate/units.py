"""Launches of sums of matrix units: which kernel, with which numbers, on which planes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qsim_kernels.numbers.grid import Mode, Overflow, Rule
from qsim_kernels.numbers.sums import LEAST_EXPONENT, SINGLE_GRID, AlignedSum, BlockScaledSum, PromotedSum, Sum, TwoStepSum
from qsim_kernels.triton.accumulate.aligned import AlignedVariant, aligned_kernel
from qsim_kernels.triton.accumulate.call import AccumulateCall, ResultTile, has_dpx, options
from qsim_kernels.triton.accumulate.exact_groups import LEAST_SIZE, GroupsVariant, exact_groups_kernel
from qsim_kernels.triton.accumulate.planes import PlaneScales, planes
from qsim_kernels.triton.accumulate.two_step import TwoStepVariant, two_step_kernel
from qsim_kernels.triton.host import arguments

#: The longest sum that stays in float32's range where all operands' exponents are at most `planes.NARROW`.
_LONGEST = 1 << 24


def launch_aligned(
    call: AccumulateCall, how: Sum, inner: AlignedSum, scales: tuple[PlaneScales, PlaneScales] | tuple[None, None] = (None, None)
) -> None:
    """Compute `AlignedSum`s, promoted or not, of operands that may have scales."""
    single = _sums_in_single(inner) and call.length <= _LONGEST and scales[0] is None
    is_wide = torch.zeros(1, dtype=torch.int32, device=call.a.device)
    tile = call.tile or ResultTile(8, 128, 1)
    dtype = torch.float32 if single else torch.float64
    a = planes(call.a, dtype, tile.rows, inner.block, inner.low_a, is_wide, scales=scales[0])
    b = planes(call.b.mT, dtype, tile.columns, inner.block, inner.low_b, is_wide, scales=scales[1])
    blocks = -(-call.length // inner.block)
    every = how.every // inner.block if isinstance(how, PromotedSum) else blocks
    room = call.room(a, b)
    for carrier in (True, False) if single else (False,):
        unit, variant, numbers = unit_of(inner, carrier, 2 if single else 1, isinstance(how, PromotedSum), has_dpx())
        aligned_kernel[call.programs(tile)](
            a.values, b.values, a.exponents, b.exponents, room, is_wide, a.rows, b.rows, a.length, blocks,
            every, *numbers, unit, variant, tile.rows, tile.columns, **options(tile.warps),
        )  # fmt: skip
    call.finish(room)


def launch_two_step(call: AccumulateCall, how: TwoStepSum) -> None:
    """Compute `TwoStepSum`s."""
    is_wide = torch.zeros(1, dtype=torch.int32, device=call.a.device)
    tile = call.tile or (ResultTile(8, 64, 1) if how.apart else ResultTile(16, 64, 2))
    a = planes(call.a, torch.float64, tile.rows, how.block, how.low_a, is_wide)
    b = planes(call.b.mT, torch.float64, tile.columns, how.block, how.low_b, is_wide)
    room = call.room(a, b)
    for wide in (False, True):
        block = how.block + how.block % 2
        steps = TwoStepVariant(block, how.fraction, how.second, how.apart, wide, unroll=4, dpx=has_dpx())
        two_step_kernel[call.programs(tile)](
            a.values, b.values, a.exponents, b.exponents, room, is_wide, a.rows, b.rows, a.length, -(-call.length // how.block), steps,
            tile.rows, tile.columns, **options(tile.warps),
        )  # fmt: skip
    call.finish(room)


def launch_block_scaled(call: AccumulateCall, how: BlockScaledSum) -> None:
    """Compute `BlockScaledSum`s."""
    if how.exact:
        _launch_exact_groups(call, how)
        return
    scales = (None, None) if call.scales is None else (_scales(call.scales[0], how), _scales(call.scales[1], how))
    launch_aligned(call, how, _running_sum(how), scales)


def _scales(values: Tensor, how: BlockScaledSum) -> PlaneScales:
    return PlaneScales(values, how.group, how.low_scale)


def _running_sum(how: BlockScaledSum) -> AlignedSum:
    """The same sum of products without scales."""
    return AlignedSum(SINGLE_GRID, int(Mode.TOWARD_ZERO), how.block, how.fraction, how.low_a, how.low_b)


def _launch_exact_groups(call: AccumulateCall, how: BlockScaledSum) -> None:
    tile, size = call.tile or ResultTile(64, 64, 4), max(LEAST_SIZE, 1 << (how.group - 1).bit_length())
    a = planes(call.a, torch.float32, tile.rows, how.group, padded_block=size)
    b = planes(call.b.mT, torch.float32, tile.columns, how.group, padded_block=size)
    groups, low = -(-call.length // how.group), how.low_scale
    one = call.a.new_ones((), dtype=torch.float32)
    if call.scales is None:
        low = min(low, 0)  # the exponent of one
    of_a, of_b = call.scales or (one.expand(len(call.a), call.rows, groups), one.expand(len(call.b), call.columns, groups))
    p, q = planes(of_a, torch.float32, tile.rows), planes(of_b, torch.float32, tile.columns)
    unit, _, _ = unit_of(_running_sum(how), False, 1, False, has_dpx())
    room = call.room(a, b)
    exact_groups_kernel[call.programs(tile)](
        a.values, b.values, p.values, q.values, room, a.rows, b.rows, groups, low, unit, GroupsVariant(size, how.block // how.group),
        tile.rows, tile.columns, **options(tile.warps),
    )  # fmt: skip
    call.finish(room)


@lru_cache(maxsize=256)
def unit_of(how: AlignedSum, single: bool, launches: int, promoted: bool, dpx: bool) -> tuple[AlignedVariant, Any, tuple[int, ...]]:
    """The compile-time and the runtime numbers of a matrix unit."""
    variant, numbers = arguments.rounding(how.grid, Rule(how.mode, 0, False, int(Overflow.NONFINITE)), True)
    is_single_range = how.grid.exponent == SINGLE_GRID.exponent and how.grid.least == math.ldexp(1.0, -126 - how.grid.mantissa)
    unit = AlignedVariant(
        block=how.block + how.block % 2,
        fraction=how.fraction,
        low=how.grid.exponent,
        single=single,
        nearest=how.mode == Mode.NEAREST,
        dropped=23 - how.grid.mantissa if is_single_range else -1,
        promoted=promoted,
        launches=launches,
        unroll=8 if single else 4,
        dpx=dpx,
    )
    return unit, variant, numbers[3:]


def _sums_in_single(how: AlignedSum) -> bool:
    """Whether float32 holds a block's sum exactly: a product is below `2**(fraction + 2)` units, the running sum below half of that."""
    least_unit = math.ldexp(1.0, LEAST_EXPONENT - how.fraction)
    return (4 * how.block + 2) << how.fraction <= 1 << 24 and least_unit >= SINGLE_GRID.least
