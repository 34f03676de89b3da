"""Reductions on CPUs, in loops compiled by Numba: checksums and tallies, whose counts are those of `qsim_kernels.torch.reductions`."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.numba.arguments import STORED, held
from qsim_kernels.numba.jobs import STRIP, Outcomes, Summands, packed
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numbers import tallies
from qsim_kernels.torch import reductions as reference

_CHECKSUM, _TALLY = (Loop("reductions", name) for name in ("checksum", "tally"))
#: Elements of a part, where all have consecutive indices.
_PART = 1 << 12


def checksum(x: Tensor, start: int, offset: int = 0, row: int = 0, stride: int = 0) -> Tensor:
    """Add the mixed bits of all elements to a number, modulo 2**64; see `reference.checksum`."""
    if x.element_size() not in (2, 4) or not x.numel():
        return reference.checksum(x, start, offset, row, stride)
    x, total = x.contiguous(), torch.full((), start, dtype=torch.int64)
    length, stride = (row, stride) if row else (_PART, _PART)
    job = Summands(total.data_ptr(), x.data_ptr(), x.numel(), x.element_size() == 2, offset, length, stride)
    _CHECKSUM.share(packed(job), -(-x.numel() // length), length)
    return total


def tally(x: Tensor, rounded: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Count and sum rounding outcomes; see `reference.tally`."""
    if x.dtype not in STORED or rounded.dtype not in STORED or not x.numel():
        return reference.tally(x, rounded, low, high)
    x, rounded, strips = x.contiguous(), rounded.contiguous(), -(-x.numel() // STRIP)
    counts, sums = x.new_zeros(tallies.SIZE, dtype=torch.int64), x.new_empty((strips, tallies.SUMS), dtype=torch.float64)
    _TALLY.share(packed(Outcomes(counts.data_ptr(), sums.data_ptr(), held(x), held(rounded), x.numel(), low, high)), strips, STRIP)
    return counts, sums.sum(0)
