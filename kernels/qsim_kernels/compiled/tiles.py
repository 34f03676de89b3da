"""Loops compiled by Numba for the largest magnitudes of tiles, the scales, division by the scales and multiplication by them again.

A loop goes over the rows of consecutive matrices, or over rows of tiles; formats, rules and shapes are runtime numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch

from qsim_kernels.carrier import DOUBLE, SINGLE
from qsim_kernels.compiled.bits import as_double, as_float, as_int, as_long, pointer
from qsim_kernels.scales import ScaleRule

_INFINITY, _NAN = SINGLE.infinity, SINGLE.nan
_BIAS, _MANTISSA = DOUBLE.bias, DOUBLE.mantissa
_FIT, _CEIL, _EVEN = int(ScaleRule.FIT), int(ScaleRule.CEIL), int(ScaleRule.EVEN)
_i32: Any = np.int32
_i64: Any = np.int64
_f32: Any = np.float32


@lru_cache(maxsize=2)
def amaxes_loop(x_dtype: torch.dtype) -> Callable[..., None]:
    """The loop that finds the largest magnitude of each tile, or NaN if it contains one, in some rows of tiles.

    Args:
        x_dtype: The dtype of the values, float32 or bfloat16.
    """
    is_narrow = x_dtype == torch.bfloat16

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, x_at, first, count, matrices, tiles, across, finite):
        rows, columns, height, width = tiles
        down, along, size = -(-rows // height), -(-columns // width), matrices * rows * columns
        x16, x32 = numba.carray(pointer(x_at), size, np.int16), numba.carray(pointer(x_at), size, np.int32)
        out = numba.carray(pointer(out_at), (first + count) * along, np.int32)
        for tile in range(first, first + count):
            own = tile * along
            for k in range(along):
                out[own + k] = 0
            for matrix in range(0 if across else tile // down, matrices if across else tile // down + 1):
                top = tile % down * height
                for row in range(top, min(top + height, rows)):
                    at = (matrix * rows + row) * columns
                    if width == 1:
                        found, narrow, wide = out[own : own + along], x16[at : at + columns], x32[at : at + columns]
                        for i in range(columns):
                            found[i] = max(found[i], _magnitude(_i32(_i32(narrow[i]) << 16) if is_narrow else wide[i], finite))
                        continue
                    for k in range(along):
                        start, end, largest = at + k * width, at + min(k * width + width, columns), out[own + k]
                        narrow, wide = x16[start:end], x32[start:end]
                        for i in range(end - start):
                            largest = max(largest, _magnitude(_i32(_i32(narrow[i]) << 16) if is_narrow else wide[i], finite))
                        out[own + k] = largest

    return loop  # type: ignore[no-any-return]


@numba.njit(inline="always")
def _magnitude(pattern, finite):
    """The bits of a magnitude; zero for non-finite values if they are ignored."""
    magnitude = _i32(pattern & _NAN)
    return _i32(0) if finite and magnitude >= _INFINITY else magnitude


@lru_cache(maxsize=2)
def divide_loop(x_dtype: torch.dtype) -> Callable[..., None]:
    """The loop that multiplies values by the inverses of their scales, into float32, in some rows; see `amaxes_loop`."""
    is_narrow = x_dtype == torch.bfloat16

    @numba.njit(nogil=True, cache=True, error_model="numpy")
    def loop(out_at, x_at, scales_at, first, count, tiles, across):
        rows, columns, height, width = tiles
        down, along, size = -(-rows // height), -(-columns // width), (first + count) * columns
        x16, x32 = numba.carray(pointer(x_at), size, np.int16), numba.carray(pointer(x_at), size, np.int32)
        out = numba.carray(pointer(out_at), size, np.float32)
        scales = numba.carray(pointer(scales_at), (1 if across else (first + count - 1) // rows + 1) * down * along, np.float32)
        for row in range(first, first + count):
            own, at = ((0 if across else row // rows * down) + row % rows // height) * along, row * columns
            if width == 1:
                to, narrow, wide, by = out[at : at + columns], x16[at : at + columns], x32[at : at + columns], scales[own : own + along]
                for i in range(columns):
                    to[i] = _f32(as_float(_i32(_i32(narrow[i]) << 16) if is_narrow else wide[i]) * _f32(_f32(1) / by[i]))
                continue
            for k in range(along):
                start, end, inverse = at + k * width, at + min(k * width + width, columns), _f32(_f32(1) / scales[own + k])
                to, narrow, wide = out[start:end], x16[start:end], x32[start:end]
                for i in range(end - start):
                    to[i] = _f32(as_float(_i32(_i32(narrow[i]) << 16) if is_narrow else wide[i]) * inverse)

    return loop  # type: ignore[no-any-return]


@lru_cache(maxsize=2)
def restore_loop(out_dtype: torch.dtype) -> Callable[..., None]:
    """The loop that multiplies float32 elements by their scales again, in some rows, and writes them as float32 or bfloat16."""
    is_narrow = out_dtype == torch.bfloat16

    @numba.njit(nogil=True, cache=True)
    def loop(out_at, x_at, scales_at, first, count, tiles, across, largest):
        rows, columns, height, width = tiles
        down, along, size = -(-rows // height), -(-columns // width), (first + count) * columns
        out16, out32 = numba.carray(pointer(out_at), size, np.int16), numba.carray(pointer(out_at), size, np.int32)
        x = numba.carray(pointer(x_at), size, np.float32)
        scales = numba.carray(pointer(scales_at), (1 if across else (first + count - 1) // rows + 1) * down * along, np.float32)
        most = _i32(largest)
        for row in range(first, first + count):
            own, at = ((0 if across else row // rows * down) + row % rows // height) * along, row * columns
            if width == 1:
                narrow, wide, own_x, by = (
                    out16[at : at + columns],
                    out32[at : at + columns],
                    x[at : at + columns],
                    scales[own : own + along],
                )
                for i in range(columns):
                    result = _within(_f32(own_x[i] * by[i]), most, is_narrow)
                    if is_narrow:
                        narrow[i] = np.int16(result >> 16)
                    else:
                        wide[i] = result
                continue
            for k in range(along):
                start, end, scale = at + k * width, at + min(k * width + width, columns), scales[own + k]
                narrow, wide, own_x = out16[start:end], out32[start:end], x[start:end]
                for i in range(end - start):
                    result = _within(_f32(own_x[i] * scale), most, is_narrow)
                    if is_narrow:
                        narrow[i] = np.int16(result >> 16)
                    else:
                        wide[i] = result

    return loop  # type: ignore[no-any-return]


@numba.njit(inline="always")
def _within(value, most, is_narrow):
    """The bits of a number clamped to a largest magnitude; for bfloat16 output, the upper 16 bits are the result."""
    pattern = as_int(value)
    magnitude = _i32(pattern & _NAN)
    result = _i32(min(magnitude, most) | _i32(pattern & ~_NAN))
    if is_narrow:
        # Round to nearest, ties to even; a carry beyond the largest gives infinity.
        result = _i32(result + _i32(0x7FFF) + _i32(_i32(result >> 16) & 1))
    return _i32(_NAN) if magnitude > _INFINITY else result


@numba.njit(nogil=True, cache=True, error_model="numpy")
def scales_loop(out_at, amaxes_at, count, under, rule, margin, largest, mantissa, least, numbers, zero):
    """Write the scales that result from the largest magnitudes; the steps are those of `reference.scaling.scales_of`.

    Args:
        out_at: Address of the float32 output.
        amaxes_at: Address of the float32 magnitudes.
        count: Number of scales.
        under: The scale of the whole tensor, 1 if there is none.
        rule: A `ScaleRule`.
        margin: The margin as a factor, a power of two.
        largest: The largest value of the elements.
        mantissa: Mantissa bits of the elements.
        least: The smallest scale.
        numbers: `shift`, `low`, `least`, `half`, `parity` and `top` of the plan of the scales' grid in float64.
        zero: Whether zero is in that grid.
    """
    out, amaxes = numba.carray(pointer(out_at), count, np.float32), numba.carray(pointer(amaxes_at), count, np.float32)
    field_of_largest = as_long(np.float64(largest)) >> _MANTISSA
    for i in range(count):
        a = np.float64(amaxes[i]) / under
        if not np.isfinite(a):
            out[i] = np.nan
        elif a == 0:
            out[i] = least
        else:
            if rule in (_FIT, _CEIL):
                wanted = a * margin / largest
            else:
                bits = as_long(a)
                if rule == _EVEN:
                    spare = _MANTISSA - mantissa
                    bits = bits + (_i64(1) << (spare - 1)) - 1 + ((bits >> spare) & 1) >> spare << spare
                field = (bits >> _MANTISSA) - field_of_largest + (as_long(np.float64(margin)) >> _MANTISSA)
                wanted = as_double(min(max(field, _i64(1)), _i64(2 * _BIAS)) << _MANTISSA)
            out[i] = max(_onto(wanted, numbers, zero, rule == _CEIL), least)


@numba.njit(inline="always")
def _onto(wanted, numbers, zero, up):
    """Round a positive number onto a grid, to nearest or up; see `reference.rounding`."""
    shift0, low, least, half, parity, top = numbers
    magnitude = as_long(wanted)
    shift = min(max(low + shift0 - (magnitude >> _MANTISSA), shift0), _i64(_MANTISSA)) if low else shift0
    ones = (_i64(1) << shift) - 1
    last = ((magnitude ^ parity) >> shift) & (_i64(1) if shift0 else ones & 1)
    rounded = (magnitude + (ones if up else last + (ones >> 1))) & ~ones
    if least and zero:
        leaves = magnitude > 0 if up else magnitude > half
        rounded = rounded if magnitude >= least else (least if leaves else _i64(0))
    elif least:
        rounded = max(rounded, least)
    return as_double(min(rounded, top))
