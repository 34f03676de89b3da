"""Largest magnitudes of tiles, and rounding under their scales, strip by strip.

`share` handles some rows, or rows of tiles, of consecutive matrices by one of the other three loops, which take the columns too. The first
argument of each is the address of a `Job` of `compiled.jobs`. Formats, rules, dtypes and shapes are runtime numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.numba.loops.bits import (
    GROUP,
    address_of,
    as_float,
    as_int,
    call,
    fill,
    floats,
    ints,
    largest_magnitude,
    longs,
    part,
    room_for_floats,
    room_for_ints,
    shorts,
)
from qsim_kernels.numba.loops.noise import SERVED
from qsim_kernels.numba.loops.strips import STRIP
from qsim_kernels.numba.loops.values import load
from qsim_kernels.numbers.carrier import SINGLE

_INFINITY, _NAN = SINGLE.infinity, SINGLE.nan
#: A strip, and a group that begins in it.
_ROOM = STRIP + GROUP
#: Elements that stay in the nearest cache until they are rounded.
_NEAR = 1 << 12
_i16: Any = np.int16
_i32: Any = np.int32
_f32: Any = np.float32
_LARGEST = np.finfo(np.float32).max


def share(job_at, first, count):
    """Run the loop of a job over some rows, or over some tiles if there is one row."""
    job = longs(job_at)
    columns, width = job[8], job[10]
    if job[26]:
        call(job[0], (job_at, 0, 1, first * width, min(count * width, columns - first * width)))
    else:
        call(job[0], (job_at, first, count, 0, columns))


def quantize_tiles(job_at, first, count, column, columns):
    """Round some rows of tiles under their own scales: find the largest magnitudes, replace them by scales, and round."""
    job = longs(job_at)
    divisors_at, scales_at, rows, all_columns, height, width, making_at = job[4], job[5], job[7], job[8], job[9], job[10], job[18]
    under = as_float(_i32(job[19]))
    down, along = (rows + height - 1) // height, (all_columns + width - 1) // width
    for tile in range(first, first + count):
        top = tile // down * rows + tile % down * height
        size = min(height, rows - tile % down * height)
        step = max(max(_NEAR // size, STRIP) // width, 1) * width
        for start in range(column, column + columns, step):
            here = min(step, column + columns - start)
            own, tiles = tile * along + start // width, (here + width - 1) // width
            call(job[23], (job_at, tile, 1, start, here))
            call(job[24], (making_at, own, tiles))
            if divisors_at != scales_at:
                _under_whole(floats(divisors_at + 4 * own), floats(scales_at + 4 * own), tiles, under)
            call(job[25], (job_at, top, size, start, here))


@part
def _under_whole(divisors, scales, count, under):
    """Multiply scales by the scale of the whole tensor; see `reference.scaling.under_whole`."""
    for i in range(count):
        product = _f32(scales[i] * under)
        divisors[i] = _LARGEST if product > _LARGEST else product


def find_amaxes(job_at, first, count, column, columns):
    """Write the largest magnitudes of the tiles in some rows of tiles, or NaN where one contains it."""
    job = longs(job_at)
    x_at, found_at, matrices, rows, all_columns, height, width = job[2], job[5], job[6], job[7], job[8], job[9], job[10]
    across, x_is_narrow, largest = job[11], job[13] != 0, _i32(job[20])
    given = room_for_ints(STRIP)
    down, along = (rows + height - 1) // height, (all_columns + width - 1) // width
    for tile in range(first, first + count):
        found = ints(found_at + 4 * (tile * along))
        for k in range(column // width, (column + columns + width - 1) // width):
            found[k] = 0
        for matrix in range(0 if across else tile // down, matrices if across else tile // down + 1):
            top = tile % down * height
            for row in range(top, min(top + height, rows)):
                at = (matrix * rows + row) * all_columns
                _raise_amaxes_of_row(found, given, x_at, at, x_is_narrow, column, columns, width, largest)


@part
def _raise_amaxes_of_row(found, room, x_at, at, x_is_narrow, column, columns, width, largest):
    """Replace magnitudes by larger ones of some columns of a row, which begins at element `at`."""
    for start in range(column, column + columns, STRIP):
        size = min(STRIP, column + columns - start)
        if x_is_narrow:
            load(room, x_at, at + start, size, True)
            _raise_amaxes(found, room, start, size, width, largest)
        else:
            _raise_amaxes(found, ints(x_at + 4 * (at + start)), start, size, width, largest)


@part
def _raise_amaxes(found, x, start, count, width, largest):
    """Replace magnitudes by larger ones of a strip of a row; magnitudes beyond `largest` are ignored."""
    if width == 1:
        own = ints(address_of(found) + 4 * start)
        for i in range(count):
            magnitude = _i32(x[i] & _NAN)
            own[i] = max(own[i], magnitude if magnitude <= largest else _i32(0))
        return
    tile, left, i = start // width, width - start % width, 0
    in_groups = left % GROUP == 0 and width % GROUP == 0 and count % GROUP == 0
    while i < count:
        end, most = min(i + left, count), found[tile]
        if in_groups:
            for j in range(i, end, GROUP):
                most = max(most, largest_magnitude(x, j, largest))
        else:
            for j in range(i, end):
                magnitude = _i32(x[j] & _NAN)
                most = max(most, magnitude if magnitude <= largest else _i32(0))
        found[tile] = most
        i, tile, left = end, tile + 1, width


def quantize_rows(job_at, first, count, column, columns):
    """Round some rows under given scales."""
    job = longs(job_at)
    out_at, x_at, factors_at, divisors_at, rows, all_columns, height, width = (
        job[1],
        job[2],
        job[3],
        job[4],
        job[7],
        job[8],
        job[9],
        job[10],
    )
    across, out_is_narrow, x_is_narrow, strip_at, how_at = job[11], job[12] != 0, job[13] != 0, job[14], job[15]
    seed, stream, offset, most, leaves_zero = job[16], job[17], job[21], _i32(job[22]), job[27] != 0
    given, results = room_for_ints(STRIP), room_for_ints(STRIP)
    inverses, factors, values = room_for_floats(_ROOM), room_for_floats(_ROOM), room_for_floats(STRIP)
    down, along = (rows + height - 1) // height, (all_columns + width - 1) // width
    for row in range(first, first + count):
        own, at = ((0 if across else row // rows * down) + row % rows // height) * along, row * all_columns
        by, back = floats(divisors_at + 4 * own), floats(factors_at + 4 * own)
        start, end = column, column + columns
        while start < end:
            # Every strip but the first of a row begins with a block of random bits.
            size = min(STRIP - (offset + at + start) % SERVED, end - start)
            _spread(inverses, factors, by, back, start, size, width, factors_at != 0)
            if x_is_narrow:
                load(given, x_at, at + start, size, True)
                _divide(values, given, inverses, size, leaves_zero)
            else:
                _divide(values, ints(x_at + 4 * (at + start)), inverses, size, leaves_zero)
            call(strip_at, (address_of(results), address_of(values), size, how_at, seed, stream, offset + at + start))
            _restore(out_at, at + start, results, factors, size, most, out_is_narrow)
            start += size


@part
def _spread(inverses, factors, scales, back, start, count, width, restores):
    """Write, for each element of a strip, the inverse of its scale, and the factor that restores it."""
    if width == 1:
        for i in range(count):
            inverses[i] = _f32(_f32(1) / scales[start + i])
            factors[i] = back[start + i] if restores else _f32(1)
        return
    tile, left, i = start // width, width - start % width, 0
    in_groups = left % GROUP == 0 and width % GROUP == 0
    while i < count:
        inverse, factor = _f32(_f32(1) / scales[tile]), back[tile] if restores else _f32(1)
        end = min(i + left, count)
        if in_groups:
            # Beyond the end of the strip too: there is room.
            for j in range(i, end, GROUP):
                fill(inverses, j, inverse)
                fill(factors, j, factor)
        else:
            for j in range(i, end):
                inverses[j], factors[j] = inverse, factor
        i, tile, left = end, tile + 1, width


@part
def _divide(values, x, inverses, count, leaves_zero):
    for i in range(count):
        values[i] = _f32(as_float(x[i]) * inverses[i])
    if leaves_zero:
        # What underflowed becomes the number next to zero; see `reference.scaling.kept_from_zero`.
        for i in range(count):
            if _i32(x[i] & _NAN) != 0 and values[i] == 0:
                values[i] = as_float(_i32(_i32(x[i] & ~_NAN) | 1))


@part
def _restore(out_at, start, results, factors, count, most, is_narrow):
    """Multiply elements by their factors, clamp them to a largest magnitude, and write them as float32 or bfloat16."""
    if is_narrow:
        narrow = shorts(out_at + 2 * start)
        for i in range(count):
            pattern = as_int(_f32(as_float(results[i]) * factors[i]))
            magnitude = _i32(pattern & _NAN)
            result = _i32(min(magnitude, most) | _i32(pattern & ~_NAN))
            # Round to nearest, ties to even; a carry beyond the largest gives infinity.
            result = _i32(result + _i32(0x7FFF) + _i32(_i32(result >> 16) & 1))
            narrow[i] = _i16((_i32(_NAN) if magnitude > _INFINITY else result) >> 16)
    else:
        wide = ints(out_at + 4 * start)
        for i in range(count):
            pattern = as_int(_f32(as_float(results[i]) * factors[i]))
            magnitude = _i32(pattern & _NAN)
            result = _i32(min(magnitude, most) | _i32(pattern & ~_NAN))
            wide[i] = _i32(_NAN) if magnitude > _INFINITY else result
