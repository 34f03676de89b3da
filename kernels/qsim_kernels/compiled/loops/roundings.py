"""Roundings as `arithmetic.rounding` defines them, for the loops: a function for each variant, and the numbers that it reads."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from qsim_kernels.compiled.loops.bits import longs, part
from qsim_kernels.meanings import numba as meaning
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE, Carrier, Variant
from qsim_kernels.numbers.grid import Mode

_i32: Any = np.int32
_i64: Any = np.int64
_u32: Any = np.uint32
_u64: Any = np.uint64


class OntoGrid(NamedTuple):
    """A `carrier.GridBits` and a `carrier.UsedBits`, as the functions read them."""

    shift: int
    low: int
    least: int
    half: int
    parity: int
    top: int
    bottom: int
    floor: int
    over: int
    under: int
    keep: int
    correction: int


@part
def single_at(at):
    """Read an `OntoGrid` in float32's bits from memory."""
    n = longs(at)
    ends = _i32(n[5]), _i32(n[6]), _i32(n[7]), _i32(n[8]), _i32(n[9])
    return OntoGrid(_i32(n[0]), _i32(n[1]), _i32(n[2]), _i32(n[3]), _i32(n[4]), *ends, _u32(n[10]), _u32(n[11]))


@part
def double_at(at):
    """Read an `OntoGrid` in float64's bits from memory."""
    n = longs(at)
    return OntoGrid(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], _u64(n[10]), _u64(n[11]))


@cache
def functions(carrier: Carrier, variant: Variant) -> Any:
    """`round_bits` and `random_bits`, whose parameter `variant` is not read."""
    return meaning.rounding(carrier, variant)


def of_sums(mode: Mode) -> Any:
    """`round_bits` onto the floats that matrix units add in, as float64."""
    wide = Variant(int(mode), saturate=False, flat=False, zero=True, signed=True, keep_sign=True, symmetric=True, open=False)
    return functions(DOUBLE, wide).round_bits


def of_scales(mode: Mode) -> Any:
    """`round_bits` of positive numbers onto the values of scales, as float64; `half` is -1 where zero is no value."""
    wide = Variant(int(mode), saturate=True, flat=False, zero=True, signed=False, keep_sign=False, symmetric=True, open=False)
    return functions(DOUBLE, wide).round_bits


def in_singles(variant: Variant) -> Any:
    """The functions for float32's bits."""
    return functions(SINGLE, variant)


def in_doubles(variant: Variant) -> Any:
    """The functions for float64's bits."""
    return functions(DOUBLE, variant)
