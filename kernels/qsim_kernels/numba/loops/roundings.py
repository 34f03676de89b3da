"""Roundings as `arithmetic.rounding` defines them, for the loops: a function for each variant, and the numbers that it reads."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from qsim_kernels.meanings import numba as meaning
from qsim_kernels.numba.loops.bits import longs, part
from qsim_kernels.numbers.carrier import DOUBLE, GridNumbers, UsedBits, Variant
from qsim_kernels.numbers.grid import Mode, Overflow

_i32: Any = np.int32
_u32: Any = np.uint32
_u64: Any = np.uint64


@part
def single_at(at):
    """Read a grid in float32's bits from memory, and how random bits are used."""
    n = longs(at)
    ends = _i32(n[5]), _i32(n[6]), _i32(n[7]), _i32(n[8]), _i32(n[9])
    grid = GridNumbers(_i32(n[0]), _i32(n[1]), _i32(n[2]), _i32(n[3]), _i32(n[4]), *ends)
    return grid, UsedBits(_u32(n[10]), _u32(n[11]))


@part
def double_at(at):
    """Read a grid in float64's bits from memory, and how random bits are used."""
    n = longs(at)
    grid = GridNumbers(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9])
    return grid, UsedBits(_u64(n[10]), _u64(n[11]))


#: `round_bits` and `random_bits` for a carrier's bits and a variant; they do not read their parameter `variant`.
functions = cache(meaning.rounding)


def of_sums(mode: Mode) -> Any:
    """`round_bits` onto the floats that matrix units add in, as float64."""
    wide = Variant(int(mode), int(Overflow.NONFINITE), flat=False, zero=True, signed=True, keep_sign=True, symmetric=True, open=False)
    return functions(DOUBLE, wide).round_bits


def of_scales(mode: Mode) -> Any:
    """`round_bits` of positive numbers onto the values of scales, as float64; `half` is -1 where zero is no value."""
    wide = Variant(int(mode), int(Overflow.SATURATE), flat=False, zero=True, signed=False, keep_sign=False, symmetric=True, open=False)
    return functions(DOUBLE, wide).round_bits
