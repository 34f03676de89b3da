"""Hadamard transforms of their own, where rounding does not follow in the same kernel."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers.scales import TileSizes, Turn
from qsim_kernels.torch.hadamard import hadamard as hadamard_in_torch
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, load_transformed, region_place, store_region
from qsim_kernels.triton.host.launcher import Launch, launcher
from qsim_kernels.triton.scaled.partition import Regions, cut_into, reading

#: Elements of a region of whole rows, and columns of one of columns.
_ELEMENTS, _WIDE = 1024, 64


@kernel()
def hadamard_kernel(x, out, matrices: Matrices, signs: tl.int64, TURN: tl.constexpr, REGION: tl.constexpr):
    """Write the transform of a region in float32."""
    at = region_place(tl.program_id(0), matrices, REGION)
    store_region(out, load_transformed(x, at, matrices, signs, TURN, REGION), at, matrices, REGION)


def hadamard(x: Tensor, turn: Turn) -> Tensor:
    """Transform a tensor; see `reference.hadamard.hadamard`."""
    launch = _prepared(x.shape, x.dtype, turn)
    if launch is None:
        return hadamard_in_torch(x, turn)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    launch(x.contiguous(), out)
    return out


@lru_cache(maxsize=4096)
def _prepared(shape: torch.Size, source: torch.dtype, turn: Turn) -> Launch | None:
    """The launch; none for float64, for large blocks, and for shorter last blocks."""
    count = shape.numel()
    rows, columns = (turn.length, turn.inner) if turn.inner > 1 else (count // max(turn.length, 1), turn.length)
    read = reading(count, source, TileSizes(rows, columns, max(rows, 1), max(columns, 1), False), turn) if count else None
    if read is None:
        return None
    block = 1 << read.turn.levels
    wide = _WIDE if read.turn.down else min(_ELEMENTS, max(16, block, triton.next_power_of_2(columns)))
    tall = block if read.turn.down else min(_ELEMENTS // wide, triton.next_power_of_2(rows))
    form = Regions((rows, columns), (tall, wide), (0, 0), 1 if read.turn.down else 4)
    regions = cut_into(count, (source, torch.float32), False, form)
    run = launcher(hadamard_kernel, (source,), read.turn, regions.shape, **regions.options)
    return Launch(run, regions.programs, (*regions.matrices, read.signs))
