"""The checksum of a tensor on CPUs, in a loop compiled by Numba; the same number as in `qsim_kernels.torch.checksum`."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.numba.jobs import Summands
from qsim_kernels.numba.packing import packed
from qsim_kernels.numba.threads import Loop
from qsim_kernels.torch import checksum as in_torch

_CHECKSUM = Loop("checksum", "checksum")
#: Elements of a part, where all have consecutive indices.
_PART = 1 << 12


def checksum(x: Tensor, start: int, offset: int = 0, row: int = 0, stride: int = 0) -> Tensor:
    """Add the mixed bits of all elements to a number, modulo 2**64; see `in_torch`."""
    if x.element_size() not in (2, 4) or not x.numel():
        return in_torch(x, start, offset, row, stride)
    x, total = x.contiguous(), torch.full((), start, dtype=torch.int64)
    length, stride = (row, stride) if row else (_PART, _PART)
    job = Summands(total.data_ptr(), x.data_ptr(), x.numel(), x.element_size() == 2, offset, length, stride)
    _CHECKSUM.share(packed(job), -(-x.numel() // length), length)
    return total
