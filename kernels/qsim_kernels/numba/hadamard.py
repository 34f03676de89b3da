"""Hadamard transforms on CPUs, in a loop compiled by Numba; bit for bit the same as `qsim_kernels.torch.hadamard`."""

from __future__ import annotations

import math
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
    largest = math.inf if x.dtype == torch.float16 else torch.finfo(torch.float32).max / turn.size
    signs, norms = _factors(turn.size, turn.signs)
    # Threads share whole blocks where they can, because there may be only one matrix.
    whole = turn.length % turn.size == 0
    length = turn.size if whole else turn.length
    count, threads = out.numel() // (length * turn.inner), torch.get_num_threads()
    part = -(-count // threads)
    lanes = torch.empty(threads * turn.size * _LANES, dtype=torch.float32, device=_CPU)
    matrices = out.data_ptr(), length, turn.inner, whole and turn.inner == 1
    factors = signs.data_ptr(), norms.data_ptr(), norms.numel(), SINGLE.pattern(largest)
    _TRANSFORM.share(packed(Transform(*matrices, *factors, lanes.data_ptr(), part)), count, length * turn.inner, part)
    return out


@lru_cache(maxsize=64)
def _factors(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The signs of a block's elements, and the last factor of blocks of every power of two up to the size."""
    signs = reference.signs_of(Turn(size, 0, 0, seed))
    norms = [(1 << power) ** -0.5 for power in range(size.bit_length())]
    return torch.tensor(signs, dtype=torch.float32, device=_CPU), torch.tensor(norms, dtype=torch.float32, device=_CPU)
