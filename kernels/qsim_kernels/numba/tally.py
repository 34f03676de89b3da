"""Tallies of rounding outcomes on CPUs, in a loop compiled by Numba; the counts are those of `qsim_kernels.torch.tally`."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.numba.jobs import Outcomes
from qsim_kernels.numba.packing import packed
from qsim_kernels.numba.stored import STORED, held
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numbers import tallies
from qsim_kernels.torch import tally as reference

_TALLY = Loop("tally", "tally")
_STRIP = 512  # as in `loops.strips`


def tally(x: Tensor, rounded: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Count and sum rounding outcomes; see `reference.tally.tally`."""
    if x.dtype not in STORED or rounded.dtype not in STORED or not x.numel():
        return reference.tally(x, rounded, low, high)
    x, rounded, strips = x.contiguous(), rounded.contiguous(), -(-x.numel() // _STRIP)
    counts, sums = x.new_zeros(tallies.SIZE, dtype=torch.int64), x.new_empty((strips, tallies.SUMS), dtype=torch.float64)
    _TALLY.share(packed(Outcomes(counts.data_ptr(), sums.data_ptr(), held(x), held(rounded), x.numel(), low, high)), strips, _STRIP)
    return counts, sums.sum(0)
