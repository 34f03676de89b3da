"""The scale of a whole transformed bfloat16 tensor, in one launch, and the largest magnitudes of runs of rows: overrides of `amaxes`.

A thread holds blocks of the transform that run down a pair of columns, as in `turned`, so that it needs neither shared memory nor other
threads. The programs finish as in `whole`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers.scales import ScaleNumbers, Scales, TileSizes, Turn
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.tile_scales import making_of
from qsim_kernels.triton.device.transforms import largest_of_transform
from qsim_kernels.triton.host.launcher import Launch, launcher
from qsim_kernels.triton.scaled.partition import pair_signs, reading
from qsim_kernels.triton.scaled.whole import state_for, write_scale

#: Pairs of columns of a program, its warps, and the blocks of a thread.
_PAIRS, _WARPS, _STEPS = 128, 4, 4


@kernel(do_not_specialize_on_alignment=["out", "state"])
def turned_scale_kernel(
    x, out, state, blocks: tl.int64, columns: tl.int64, signs: tl.int64, making: ScaleNumbers,
    MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, TURN: tl.constexpr, FINITE: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write the scale of transformed columns, which are counted in pairs; for `state` see `state_for`."""
    along = tl.cdiv(columns, PAIRS).to(tl.int32)
    row = (tl.program_id(0) // along).to(tl.int64) * STEPS
    pair = (tl.program_id(0) % along).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    source, inside = x.to(tl.pointer_type(tl.int32)) + pair, pair < columns
    amax = largest_of_transform(source, row, blocks, columns, inside, signs, TURN, FINITE, STEPS)
    write_scale(out, state, amax, making, MAKING, SCALE_ROUNDING)


@kernel(do_not_specialize_on_alignment=["out", "held"])
def turned_amaxes_kernel(
    x, out, held, columns: tl.int64, signs: tl.int64, TURN: tl.constexpr, FINITE: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Raise the number of each transformed block in `out`, zero at first, to its largest magnitude; for `held` see `in_memory`."""
    along = tl.cdiv(columns, PAIRS).to(tl.int32)
    block = tl.program_id(0) // along
    pair = (tl.program_id(0) % along).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    first, filled = tl.load(held + 2 * block).to(tl.int64), tl.load(held + 2 * block + 1)
    source, inside = x.to(tl.pointer_type(tl.int32)) + first * columns + pair, pair < columns
    amax = largest_of_transform(source, 0, 1, columns, inside, signs, TURN, FINITE, 1, filled)
    tl.atomic_max(out.to(tl.pointer_type(tl.int32)) + block, amax, sem="relaxed")


def turned_scale_into(out: Tensor, x: Tensor, tiles: TileSizes, turn: Turn, finite: bool, making: Scales) -> bool:
    """Write the scale of a transformed tensor, if kernels of this file find it."""
    launch = _prepared(x.shape, x.dtype, tiles, turn, finite, making)
    if launch is None or x.data_ptr() % 4:
        return False
    launch(x.contiguous(), out, state_for(x))
    return True


def turned_amaxes_into(out: Tensor, x: Tensor, held: Tensor, tiles: TileSizes, turn: Turn | None, finite: bool) -> bool:
    """Write the largest magnitude of each run of rows after a transform, if kernels of this file find it: of blocks that are runs."""
    launch = _of_runs(len(held), x.dtype, tiles, turn, finite) if x.numel() else None
    if launch is None or x.data_ptr() % 4:
        return False
    launch(x.contiguous(), out.zero_(), held)
    return True


@lru_cache(maxsize=4096)
def _of_runs(count: int, source: torch.dtype, tiles: TileSizes, turn: Turn | None, finite: bool) -> Launch | None:
    """Prepare a launch for such runs."""
    read = reading(count * tiles.rows * tiles.columns, source, tiles, turn) if turn is not None and source == torch.bfloat16 else None
    fits = tiles[:2] == tiles[2:4] and turn is not None and turn.size == tiles.rows
    if read is None or not fits or not read.turn.down or tiles.columns % 2:
        return None
    columns = tiles.columns // 2
    run = launcher(turned_amaxes_kernel, (), read.turn, finite, _PAIRS, num_warps=_WARPS)
    return Launch(run, count * -(-columns // _PAIRS), (columns, pair_signs(read)))


@lru_cache(maxsize=4096)
def _prepared(shape: torch.Size, source: torch.dtype, tiles: TileSizes, turn: Turn, finite: bool, making: Scales) -> Launch | None:
    """Prepare a launch for full blocks down the columns of a tensor with one scale."""
    count = shape.numel()
    read = reading(count, source, tiles, turn) if source == torch.bfloat16 and count else None
    if read is None or tiles.counts(count) != (1, 1, 1) or not read.turn.down or read.turn.levels > 5 or turn.inner % 2:
        return None
    blocks, columns = count // turn.inner >> read.turn.levels, turn.inner // 2
    variants, numbers = making_of(making, False)
    run = launcher(turned_scale_kernel, (), *numbers, *variants, read.turn, finite, _PAIRS, _STEPS, num_warps=_WARPS)
    return Launch(run, -(-blocks // _STEPS) * -(-columns // _PAIRS), (blocks, columns, pair_signs(read)))
