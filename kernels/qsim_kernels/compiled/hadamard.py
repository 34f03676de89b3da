"""Hadamard transforms on CPUs, in a loop compiled by Numba; bit for bit the same as `qsim_kernels.reference.hadamard`."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.carrier import SINGLE
from qsim_kernels.compiled.native import Native
from qsim_kernels.compiled.threads import in_parts
from qsim_kernels.reference import hadamard as reference
from qsim_kernels.scales import Turn

_TRANSFORM = Native("hadamard", "transform_rows", 9)
_LANES = 64  # as in `loops.hadamard`
_CPU = torch.device("cpu")


def hadamard(x: Tensor, turn: Turn) -> Tensor:
    """Transform a tensor, in float32, or in float64 for float64 input; see `reference.hadamard`."""
    if x.dtype == torch.float64 or not x.numel():
        return reference.hadamard(x, turn)
    out = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    largest = math.inf if x.dtype == torch.float16 else torch.finfo(torch.float32).max / turn.size
    signs, norms = _factors(turn.size, turn.signs)
    given = signs.data_ptr(), norms.data_ptr(), norms.numel(), SINGLE.pattern(largest)
    # Threads share whole blocks where they can, because there may be only one row.
    whole = turn.length % turn.size == 0
    row = (turn.size if whole else turn.length) * turn.inner
    rows = out.numel() // row

    def part(first: int, count: int) -> None:
        # Blocks that follow each other form one long row.
        shape = (1, count * row) if whole and turn.inner == 1 else (count, row // turn.inner)
        lanes = torch.empty(turn.size * _LANES, dtype=torch.float32, device=_CPU)
        _TRANSFORM.run(out.data_ptr() + first * row * out.element_size(), *shape, turn.inner, *given, lanes.data_ptr())

    in_parts(part, rows, row)
    return out


@lru_cache(maxsize=64)
def _factors(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The signs of a block's elements, and the last factor of blocks of every power of two up to the size."""
    signs = reference.signs_of(Turn(size, 0, 0, seed))
    norms = [(1 << power) ** -0.5 for power in range(size.bit_length())]
    return torch.tensor(signs, dtype=torch.float32, device=_CPU), torch.tensor(norms, dtype=torch.float32, device=_CPU)
