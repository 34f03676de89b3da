"""A sum over a tensor's elements, each mixed with its index, in one read; see `reference.checksum`."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.meanings.triton import mixing
from qsim_kernels.triton.device.parts import block_part, load_part
from qsim_kernels.triton.host.launcher import Launch, launcher

_BLOCK = 1024
_STEPS = 8  # blocks that share one atomic addition
#: Small tensors need one program, which writes the result; others add theirs to a number that is written before.
_WIDE_BLOCK = 1 << 13
_SMALL = 8 * _WIDE_BLOCK

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

folded, mixed = mixing.folded, mixing.mixed


@triton.jit
def word_of(element):
    """The bits of elements as words of 32 bits."""
    if element.dtype == tl.int64:
        return folded(element)
    else:
        return element.to(tl.int32).to(tl.uint32, bitcast=True)


@triton.jit
def checksum_block(words, start, count, offset, row, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The summand of each element of a block."""
    part = block_part(start, count, BLOCK, MASKED)
    index = start + part.places
    if ROWS:
        index = index // row * stride + index % row
    h = mixed(word_of(load_part(words, part)), offset + index).to(tl.int64)
    if MASKED:
        h = tl.where(part.inside, h, 0)
    return h


@triton.jit(do_not_specialize=["start", "offset", "row", "stride", "count"])
def checksum_kernel(
    x, total, start: tl.int64, offset: tl.int64, row: tl.int64, stride: tl.int64, count: tl.int64,
    WORD: tl.constexpr, ROWS: tl.constexpr, SINGLE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add `count` words to `total`, in any order, which integer addition allows; a single program adds them to `start`."""
    words = x.to(tl.pointer_type(WORD))
    first = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK)
    sums = tl.zeros([BLOCK], tl.int64)
    if first + STEPS * BLOCK <= count:
        for step in range(STEPS):
            sums += checksum_block(words, first + step * BLOCK, count, offset, row, stride, ROWS, BLOCK, False)
    else:
        for step in range(STEPS):
            sums += checksum_block(words, first + step * BLOCK, count, offset, row, stride, ROWS, BLOCK, True)
    if SINGLE:
        tl.store(total, start + tl.sum(sums))
    else:
        tl.atomic_add(total, tl.sum(sums), sem="relaxed")


def checksum(x: Tensor, start: int, offset: int = 0, row: int = 0, stride: int = 0) -> Tensor:
    """Add the mixed bits of all elements to a number; see `reference.checksum`."""
    launch = _prepared(x.numel(), x.dtype, row > 0)
    if launch.programs == 1:
        total = torch.empty((), dtype=torch.int64, device=x.device)
    else:
        total = torch.full((), start, dtype=torch.int64, device=x.device)
    launch(x.contiguous(), total, start, offset, row, stride)
    return total


@lru_cache(maxsize=4096)
def _prepared(count: int, dtype: torch.dtype, rows: bool) -> Launch:
    single = 0 < count <= _SMALL
    steps, block, warps = (_SMALL // _WIDE_BLOCK, _WIDE_BLOCK, 32) if single else (_STEPS, _BLOCK, 4)
    constants = (_WORDS[dtype.itemsize], rows, single, steps, block)
    return Launch(launcher(checksum_kernel, (dtype,), *constants, num_warps=warps), -(-count // (steps * block)), (count,))
