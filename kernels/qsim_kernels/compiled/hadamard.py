"""Hadamard transforms on CPUs, in a loop compiled by Numba; bit for bit the same as `qsim_kernels.reference.hadamard`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from qsim_kernels.compiled.bits import pointer
from qsim_kernels.compiled.threads import in_parts
from qsim_kernels.reference import hadamard as reference
from qsim_kernels.scales import Turn

#: Blocks that are transformed at once, so that additions are vectorized.
_LANES = 64
_f32: Any = np.float32


def hadamard(x: Tensor, turn: Turn) -> Tensor:
    """Transform a tensor, in float32, or in float64 for float64 input; see `reference.hadamard`."""
    if x.dtype == torch.float64 or not x.numel():
        return reference.hadamard(x, turn)
    out = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    largest = math.inf if x.dtype == torch.float16 else torch.finfo(torch.float32).max / turn.size
    at, (signs, norms) = out.data_ptr(), _factors(turn.size, turn.signs)
    # Threads share whole blocks where they can, because there may be only one row.
    whole = turn.length % turn.size == 0
    row = (turn.size if whole else turn.length) * turn.inner
    rows = out.numel() // row

    def part(first: int, count: int) -> None:
        # Blocks that follow each other form one long row.
        shape = (1, count * row) if whole and turn.inner == 1 else (count, row // turn.inner)
        _transform_rows(at + first * row * out.element_size(), *shape, turn.inner, signs, norms, _f32(largest))

    in_parts(part, rows, row)
    return out


@lru_cache(maxsize=64)
def _factors(size: int, seed: int) -> tuple[Any, Any]:
    """The signs of a block's elements, and the last factor of blocks of every power of two up to the size."""
    signs = reference.signs_of(Turn(size, 0, 0, seed))
    return np.array(signs, np.float32), np.array([(1 << power) ** -0.5 for power in range(size.bit_length())], np.float32)


@numba.njit(nogil=True, cache=True)
def _transform_rows(at, rows, length, inner, signs, norms, largest):
    """Transform consecutive matrices of `length` by `inner` float32 numbers in place, along their first dimension."""
    x, size = numba.carray(pointer(at), rows * length * inner, np.float32), len(signs)
    lanes = np.zeros((size, _LANES), np.float32)
    for row in range(rows):
        done, block, power = 0, size, len(norms) - 1
        while block:
            count, own = (length - done) // block, signs[done % size : done % size + block]
            start = (row * length + done) * inner
            if inner == 1:
                for k in range(0, count, _LANES):
                    _transform(x[start + k * block :], 1, block, min(_LANES, count - k), lanes[:block], own, norms[power], largest)
            else:
                for k in range(count):
                    for i in range(0, inner, _LANES):
                        place = start + k * block * inner + i
                        _transform(x[place:], inner, 1, min(_LANES, inner - i), lanes[:block], own, norms[power], largest)
            done, block, power = done + count * block, block // 2, power - 1


@numba.njit(nogil=True, cache=True)
def _transform(x, along, across, count, lanes, signs, norm, largest):
    """Transform up to `_LANES` blocks, whose elements lie `along` apart, and the blocks `across`."""
    # Rows as slices, because the compiler then knows that no index is negative and vectorizes the loops.
    for i in range(len(signs)):
        own, to, sign = x[i * along :], lanes[i], signs[i]
        for lane in range(count):
            value = own[lane * across]
            # Infinities and NaN stay.
            value = largest if largest < value < np.inf else value
            value = -largest if -np.inf < value < -largest else value
            to[lane] = value * sign
    step = 1
    while step < len(signs):
        for start in range(0, len(signs), 2 * step):
            for i in range(start, start + step):
                low, high = lanes[i], lanes[i + step]
                for lane in range(count):
                    first, second = low[lane], high[lane]
                    low[lane], high[lane] = _f32(first + second), _f32(first - second)
        step *= 2
    for i in range(len(signs)):
        own, result = x[i * along :], lanes[i]
        for lane in range(count):
            own[lane * across] = _f32(result[lane] * norm)
