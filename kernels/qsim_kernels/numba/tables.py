"""Lookup tables for the codes and values of narrow formats."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.numba.jobs import LookUp, packed
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numbers.carrier import SINGLE, grid_bits
from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import Coding, Grid, Mode, Overflow, Rule
from qsim_kernels.torch import decode_into, encode_into

#: Codes of at most this many bits have tables.
BITS = 8
# Passed in every call, because torch's default device may be a different one.
_CPU = torch.device("cpu")
_NEAREST = Rule(int(Mode.NEAREST), 0, False, int(Overflow.NONFINITE))
_LOOK_UP = Loop("tables", "look_up")


def has_codes(grid: Grid, coding: Coding) -> bool:
    """Whether the codes of a grid's values can be looked up: codes take one byte, and bfloat16 holds the values exactly."""
    bits = grid_bits(grid, wide=False)
    return coding.bits <= BITS and bits.carrier == SINGLE and bits.shift >= 16


@lru_cache(maxsize=64)
def code_table(grid: Grid, coding: Coding) -> Tensor:
    """The code of each bfloat16 number that is a value of the grid, indexed by bit pattern."""
    numbers = torch.arange(1 << 16, dtype=torch.int32, device=_CPU).to(torch.int16).view(torch.bfloat16)
    table = torch.empty(numbers.shape, dtype=torch.uint8, device=_CPU)
    encode_into(table, numbers, Encoding(grid, _NEAREST, coding), (None, 0, 0), check=False)
    return table


@lru_cache(maxsize=256)
def value_table(grid: Grid, coding: Coding, dtype: torch.dtype) -> Tensor:
    """The value of each code of at most `BITS` bits."""
    table = torch.empty(1 << BITS, dtype=dtype, device=_CPU)
    decode_into(table, torch.arange(1 << BITS, device=_CPU).to(torch.uint8), grid, coding)
    return table


def look_up(out: Tensor, indices: Tensor, table: Tensor) -> None:
    """Look up unsigned indices in a table, between contiguous tensors."""
    job = LookUp(out.data_ptr(), indices.data_ptr(), table.data_ptr(), out.element_size(), indices.element_size())
    _LOOK_UP.share(packed(job), indices.numel())
