"""Roundings as `arithmetic.rounding` defines them, for the loops: a function for each variant, and the numbers that it reads."""

from __future__ import annotations

from functools import cache
from typing import Any

from qsim_kernels.meanings import numba as meaning
from qsim_kernels.numba.jobs import RoundingNumbers
from qsim_kernels.numba.loops.bits import record_at, types
from qsim_kernels.numbers.carrier import DOUBLE, GridNumbers, UsedBits, Variant
from qsim_kernels.numbers.grid import Mode, Overflow

#: Functions that read a `RoundingNumbers` in float32's and in float64's bits.
single_at = record_at(RoundingNumbers, {GridNumbers: types.int32, UsedBits: types.uint32})
double_at = record_at(RoundingNumbers, {GridNumbers: types.int64, UsedBits: types.uint64})

#: `round_bits` and `random_bits` for a carrier's bits and a variant; they do not read their parameter `variant`.
functions = cache(meaning.rounding)


def of_sums(mode: Mode) -> Any:
    """`round_bits` onto the floats that matrix units add in, as float64."""
    wide = Variant(int(mode), int(Overflow.NONFINITE), flat=False, zero=True, signed=True, keep_sign=True, symmetric=True, open=False)
    return functions(DOUBLE, wide).round_bits
