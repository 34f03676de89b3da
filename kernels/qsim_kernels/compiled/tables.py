"""Lookup tables for the codes and values of narrow formats."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from qsim_kernels.carrier import SINGLE, plan
from qsim_kernels.compiled.bits import pointer
from qsim_kernels.compiled.threads import in_parts
from qsim_kernels.grid import Coding, Grid, Mode, Rule
from qsim_kernels.reference import decode_into, encode_into

#: Codes of at most this many bits have tables.
BITS = 8
# Passed in every call, because torch's default device may be a different one.
_CPU = torch.device("cpu")
_NEAREST = Rule(int(Mode.NEAREST), 0, False, saturate=False)
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def has_codes(grid: Grid, coding: Coding) -> bool:
    """Whether the codes of a grid's values can be looked up: codes take one byte, and bfloat16 holds the values exactly."""
    how = plan(grid, wide=False)
    return coding.bits <= BITS and how.carrier == SINGLE and how.shift >= 16


@lru_cache(maxsize=64)
def codes(grid: Grid, coding: Coding) -> Tensor:
    """The code of each bfloat16 number that is a value of the grid, indexed by bit pattern."""
    numbers = torch.arange(1 << 16, dtype=torch.int32, device=_CPU).to(torch.int16).view(torch.bfloat16)
    table = torch.empty(numbers.shape, dtype=torch.uint8, device=_CPU)
    encode_into(table, numbers, None, grid, _NEAREST, coding, 0, 0, check=False)
    return table


@lru_cache(maxsize=256)
def values(grid: Grid, coding: Coding, dtype: torch.dtype) -> Tensor:
    """The value of each code of at most `BITS` bits."""
    table = torch.empty(1 << BITS, dtype=dtype, device=_CPU)
    decode_into(table, torch.arange(1 << BITS, device=_CPU).to(torch.uint8), grid, coding)
    return table


def look_up(out: Tensor, places: Tensor, table: Tensor) -> None:
    """Look up unsigned indices in a table, between contiguous tensors."""
    loop = _loop(out.element_size(), places.element_size())
    out_at, places_at, table_at, size = out.data_ptr(), places.data_ptr(), table.data_ptr(), table.numel()
    steps = out.element_size(), places.element_size()
    in_parts(lambda at, count: loop(out_at + at * steps[0], places_at + at * steps[1], count, table_at, size), places.numel())


@lru_cache(maxsize=16)
def _loop(entry: int, place: int) -> Callable[..., None]:
    entries, places = _UNSIGNED[entry], _UNSIGNED[place]

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, places_at, count, table_at, size):
        out, at = numba.carray(pointer(out_at), count, entries), numba.carray(pointer(places_at), count, places)
        table = numba.carray(pointer(table_at), size, entries)
        for i in range(count):
            out[i] = table[at[i]]

    return loop  # type: ignore[no-any-return]
