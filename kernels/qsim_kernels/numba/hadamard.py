"""Hadamard transforms on CPUs, in a loop compiled by Numba; bit for bit the same as `qsim_kernels.torch.hadamard`."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.numba.jobs import Transform, packed
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numbers.carrier import SINGLE
from qsim_kernels.numbers.scales import Turn
from qsim_kernels.torch import hadamard as reference

_TRANSFORM = Loop("hadamard", "transform")
_LANES = 64  # as in `loops.hadamard`
_CPU = torch.device("cpu")


def hadamard(x: Tensor, turn: Turn) -> Tensor:
    """Transform a tensor, in float32, or in float64 for float64 input; see `reference.hadamard`."""
    if x.dtype == torch.float64 or not x.numel():
        return reference.hadamard(x, turn)
    out = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    largest = SINGLE.infinity - 1 if x.dtype == torch.float16 else SINGLE.pattern(torch.finfo(torch.float32).max / turn.size)
    signs, norms = _factors(turn.size, turn.signs)
    # Threads share whole blocks where they can, because there may be only one matrix.
    whole = turn.length % turn.size == 0
    length = turn.size if whole else turn.length
    count, threads = out.numel() // (length * turn.inner), torch.get_num_threads()
    part = -(-count // threads)
    lanes = torch.empty(threads * turn.size * _LANES, dtype=torch.int32, device=_CPU)
    matrices = out.data_ptr(), length, turn.inner, whole and turn.inner == 1
    job = Transform(*matrices, signs.data_ptr(), norms.data_ptr(), norms.numel(), largest, lanes.data_ptr(), part)
    _TRANSFORM.share(packed(job), count, length * turn.inner, part)
    return out


@lru_cache(maxsize=64)
def _factors(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the sign bits that a block's elements are flipped by, and the last factor of blocks of every power of two up to the size."""
    signs = [SINGLE.sign if sign < 0 else 0 for sign in reference.signs_of(Turn(size, 0, 0, seed))]
    norms = [(1 << power) ** -0.5 for power in range(size.bit_length())]
    return torch.tensor(signs, dtype=torch.int32, device=_CPU), torch.tensor(norms, dtype=torch.float32, device=_CPU)
