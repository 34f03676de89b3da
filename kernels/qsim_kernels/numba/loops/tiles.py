"""Largest magnitudes of tiles, and rounding under their scales, strip by strip.

`share` handles some rows, or rows of tiles, of consecutive matrices by one of the other three loops, which take the columns too. The first
argument of each is the address of a `TilesJob`. Formats, rules, dtypes and shapes are runtime numbers.
"""

from __future__ import annotations

from qsim_kernels.arithmetic.philox import SHARED
from qsim_kernels.meanings import numba as meaning
from qsim_kernels.numba.jobs import STRIP, TilesJob
from qsim_kernels.numba.loops.bits import address_of, call, i16, i32, ints, part, record_at, room_for_ints, shorts
from qsim_kernels.numba.loops.values import load
from qsim_kernels.numbers.carrier import SINGLE

_NAN, _ONE = SINGLE.nan, SINGLE.pattern(1.0)
#: Elements that stay in the nearest cache until they are rounded.
_NEAR = 1 << 12
_job_at = record_at(TilesJob)
_inverse, _kept_from_zero, _product = meaning.elements.inverse, meaning.elements.kept_from_zero, meaning.elements.product
_saturated, _to_bfloat16, _under_whole = meaning.elements.saturated, meaning.elements.to_bfloat16, meaning.elements.under_whole


def share(job_at, first, count):
    """Run the loop of a job over some rows, or over some tiles if there is one row."""
    job = _job_at(job_at)
    sizes = job.tiles
    if job.by_tiles:
        start = first * sizes.width
        call(job.loop, (job_at, 0, 1, start, min(count * sizes.width, sizes.columns - start)))
    else:
        call(job.loop, (job_at, first, count, 0, sizes.columns))


@part
def _tiles_of(sizes):
    """The number of tiles down a matrix, and along it."""
    return (sizes.rows + sizes.height - 1) // sizes.height, (sizes.columns + sizes.width - 1) // sizes.width


def quantize_tiles(job_at, first, count, column, columns):
    """Round some rows of tiles under their own scales: find the largest magnitudes, replace them by scales, and round."""
    job = _job_at(job_at)
    sizes = job.tiles
    down, along = _tiles_of(sizes)
    for row in range(first, first + count):
        top = row % down * sizes.height
        height = min(sizes.height, sizes.rows - top)
        step = max(max(_NEAR // height, STRIP) // sizes.width, 1) * sizes.width
        for start in range(column, column + columns, step):
            size = min(step, column + columns - start)
            tile, tiles = row * along + start // sizes.width, (size + sizes.width - 1) // sizes.width
            call(job.amaxes_loop, (job_at, row, 1, start, size))
            call(job.scales_loop, (job.scales_job, tile, tiles))
            if job.divisors != job.scales:
                divisors, scales = ints(job.divisors + 4 * tile), ints(job.scales + 4 * tile)
                for i in range(tiles):
                    divisors[i] = _under_whole(scales[i], i32(job.whole))
            call(job.rows_loop, (job_at, row // down * sizes.rows + top, height, start, size))


def find_amaxes(job_at, first, count, column, columns):
    """Write the largest magnitudes of the tiles in some rows of tiles, or NaN where one contains it."""
    job, room = _job_at(job_at), room_for_ints(STRIP)
    sizes = job.tiles
    down, along = _tiles_of(sizes)
    for tile_row in range(first, first + count):
        amaxes = ints(job.scales + 4 * (tile_row * along))
        for tile in range(column // sizes.width, (column + columns + sizes.width - 1) // sizes.width):
            amaxes[tile] = 0
        top = tile_row % down * sizes.height
        for matrix in range(0 if sizes.across else tile_row // down, job.matrices if sizes.across else tile_row // down + 1):
            for row in range(top, min(top + sizes.height, sizes.rows)):
                at = (matrix * sizes.rows + row) * sizes.columns
                for start in range(column, column + columns, STRIP):
                    size = min(STRIP, column + columns - start)
                    _raise_amaxes(amaxes, _patterns(room, job, at + start, size), start, size, sizes.width, i32(job.finite))


@part
def _patterns(room, job, start, count):
    """The patterns of some elements: in memory, or in `room` if they are bfloat16."""
    if job.x.is_narrow:
        load(room, job.x.at, start, count, True)
        return room
    return ints(job.x.at + 4 * start)


@part
def _raise_amaxes(amaxes, x, start, count, width, finite):
    """Replace magnitudes by larger ones of a strip of a row; magnitudes beyond `finite` are ignored."""
    if width == 1:
        for i in range(count):
            amaxes[start + i] = max(amaxes[start + i], _counted(x[i], finite))
        return
    tile, left, i = start // width, width - start % width, 0
    while i < count:
        end, amax = min(i + left, count), amaxes[tile]
        for j in range(i, end):
            amax = max(amax, _counted(x[j], finite))
        amaxes[tile] = amax
        i, tile, left = end, tile + 1, width


@part
def _counted(pattern, finite):
    """A magnitude, or 0 if it is ignored."""
    magnitude = i32(pattern & _NAN)
    return magnitude if magnitude <= finite else i32(0)


def quantize_rows(job_at, first, count, column, columns):
    """Round some rows under given scales."""
    job = _job_at(job_at)
    room, results, values = room_for_ints(STRIP), room_for_ints(STRIP), room_for_ints(STRIP)
    inverses, factors = room_for_ints(STRIP), room_for_ints(STRIP)
    sizes, noise = job.tiles, job.noise
    down, along = _tiles_of(sizes)
    for row in range(first, first + count):
        at, matrix = row * sizes.columns, 0 if sizes.across else row // sizes.rows
        tile = (matrix * down + row % sizes.rows // sizes.height) * along
        start, end = column, column + columns
        while start < end:
            # Every strip but the first of a row begins with a block of random bits.
            size = min(STRIP - (noise.offset + at + start) % SHARED, end - start)
            divisors, scales = ints(job.divisors + 4 * tile), ints(job.factors + 4 * tile)
            _spread(inverses, factors, divisors, scales, start, size, sizes.width, job.factors != 0)
            x = _patterns(room, job, at + start, size)
            for i in range(size):
                values[i] = _product(x[i], inverses[i])
            if job.leaves_zero:
                for i in range(size):
                    values[i] = _kept_from_zero(values[i], x[i])
            drawn = noise.seed, noise.stream, noise.offset + at + start
            call(job.strip.loop, (address_of(results), address_of(values), size, job.strip.grid, *drawn))
            _restore(job, at + start, results, factors, size)
            start += size


@part
def _spread(inverses, factors, divisors, scales, start, count, width, restores):
    """Write, for each element of a strip, the inverse of what divides it, and the factor that restores it."""
    if width == 1:
        for i in range(count):
            inverses[i] = _inverse(divisors[start + i])
            factors[i] = scales[start + i] if restores else i32(_ONE)
        return
    tile, left, i = start // width, width - start % width, 0
    while i < count:
        inverse, factor = _inverse(divisors[tile]), scales[tile] if restores else i32(_ONE)
        end = min(i + left, count)
        for j in range(i, end):
            inverses[j], factors[j] = inverse, factor
        i, tile, left = end, tile + 1, width


@part
def _restore(job, start, results, factors, count):
    """Multiply elements by their factors, limit them to a largest magnitude, and write them as float32 or bfloat16."""
    limit = i32(job.limit)
    if job.out.is_narrow:
        narrow = shorts(job.out.at + 2 * start)
        for i in range(count):
            narrow[i] = i16(_to_bfloat16(_product(results[i], factors[i]), limit) >> 16)
    else:
        wide = ints(job.out.at + 4 * start)
        for i in range(count):
            wide[i] = _saturated(_product(results[i], factors[i]), limit)
