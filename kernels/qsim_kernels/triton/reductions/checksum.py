"""A sum over a tensor's elements, each mixed with its index, in one read; see `reference.checksum`."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels import mixing
from qsim_kernels.triton.device.blocks import load
from qsim_kernels.triton.host.launcher import Launcher
from qsim_kernels.triton.host.layouts import flat

_BLOCK = 1024
_STEPS = 8  # blocks that share one atomic addition

FOLD: tl.constexpr = tl.constexpr(mixing.FOLD)
SPREAD: tl.constexpr = tl.constexpr(mixing.SPREAD)
FIRST: tl.constexpr = tl.constexpr(mixing.STIR[0])
SECOND: tl.constexpr = tl.constexpr(mixing.STIR[1])


@triton.jit
def mixed(words, index):
    """Mix a word and an index into 32 bits that depend on all of both."""
    if words.dtype == tl.int64:
        word = (words ^ (words >> 32) * FOLD).to(tl.uint32)
    else:
        word = words.to(tl.int32).to(tl.uint32, bitcast=True)
    h = word ^ ((index + (index >> 32) * FOLD) * SPREAD).to(tl.uint32)
    h *= FIRST[0]
    h ^= h >> FIRST[1]
    h *= SECOND[0]
    h ^= h >> SECOND[1]
    return h


@triton.jit
def checksum_block(words, start, count, offset, row, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The summand of each element of a block."""
    place = tl.arange(0, BLOCK)
    index = start + place
    if ROWS:
        index = index // row * stride + index % row
    h = mixed(load(words + start, place, count - start, MASKED), offset + index).to(tl.int64)
    if MASKED:
        h = tl.where(place < count - start, h, 0)
    return h


@triton.jit(do_not_specialize=["count", "offset", "row", "stride"])
def checksum_kernel(
    words, total, count: tl.int64, offset: tl.int64, row: tl.int64, stride: tl.int64,
    ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add `count` words to `total`, in any order, which integer addition allows."""
    start = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK)
    own = tl.zeros([BLOCK], tl.int64)
    if start + STEPS * BLOCK <= count:
        for step in range(STEPS):
            own += checksum_block(words, start + step * BLOCK, count, offset, row, stride, ROWS, BLOCK, False)
    else:
        for step in range(STEPS):
            own += checksum_block(words, start + step * BLOCK, count, offset, row, stride, ROWS, BLOCK, True)
    tl.atomic_add(total, tl.sum(own), sem="relaxed")


@lru_cache(maxsize=8)
def _adder(dtype: torch.dtype, rows: bool) -> Launcher:
    """The launcher for a dtype: a launcher's compiled forms do not distinguish dtypes."""
    return Launcher(checksum_kernel, (), (rows, _STEPS, _BLOCK), _STEPS * _BLOCK)


def add_words(total: Tensor, words: Tensor, offset: int = 0, row: int = 0, stride: int = 0) -> None:
    """Add the mixed bits of all `words` to `total`; see `reference.add_words`."""
    count = words.numel()
    if count:
        _adder(words.dtype, row > 0)(flat(words), total, count, offset, row, stride)
