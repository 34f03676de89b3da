"""The sum of a tensor's bits in one read. torch's own sum first writes a copy with eight bytes an element."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.triton.blocks import load
from qsim_kernels.triton.launch import Launcher

_BLOCK = 8192


@triton.jit(do_not_specialize=["count"])
def checksum_kernel(words, total, count: tl.int64, BLOCK: tl.constexpr):
    """Adds `count` words to `total`. Integers may be added in any order."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    if start + BLOCK <= count:
        tl.atomic_add(total, tl.sum(load(words + start, place, count - start, False).to(tl.int64)), sem="relaxed")
    else:
        tl.atomic_add(total, tl.sum(load(words + start, place, count - start, True).to(tl.int64)), sem="relaxed")


@lru_cache(maxsize=4)
def _adder(dtype: torch.dtype) -> Launcher:
    """One for each dtype: a launcher's compiled forms do not tell them apart."""
    return Launcher(checksum_kernel, (), (_BLOCK,), _BLOCK, num_warps=8)


def add_words(total: Tensor, words: Tensor) -> None:
    """Adds all of `words` to `total`; see `reference.add_words`."""
    count = words.numel()
    if count:
        # As they lie in memory, if that is without gaps: the order does not matter.
        dense = words if words.is_contiguous() else words.mT.contiguous() if words.dim() > 1 else words.contiguous()
        _adder(words.dtype)(dense, total, count)
