"""Rounding under scales inside a kernel: scales from a tile's largest magnitude, in the same read, or given scales."""

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import INTERPRETED, elements
from qsim_kernels.numbers.carrier import GridNumbers, UsedBits
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.triton.device.blocks import as_single, rounded
from qsim_kernels.triton.device.hadamard import hadamard
from qsim_kernels.triton.device.noise import integers_of_rows
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, load_region, narrowed, region_place, store_region
from qsim_kernels.triton.device.rounding import DOWN, ODD, UP
from qsim_kernels.triton.device.saturation import ALWAYS, BY_TENSOR, clamped, largest_finite, reach_of
from qsim_kernels.triton.device.tile_scales import MakingNumbers, inverses_of, scale_numbers, tile_scales, under_whole
from qsim_kernels.triton.device.values import rounding_of

NOTHING: tl.constexpr = tl.constexpr(int(Restore.NOTHING))
ALL: tl.constexpr = tl.constexpr(int(Restore.ALL))
kept_from_zero = elements.kept_from_zero


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_along(x, axis: tl.constexpr):
    """The largest of magnitudes along an axis, NaN if one is."""
    if INTERPRETED:
        # The largest pattern is that of a NaN, if there is one.
        largest = tl.max(x.to(tl.int32, bitcast=True), axis=axis).to(tl.float32, bitcast=True)
    else:
        largest = tl.reduce(x, axis, larger)
    return largest


@triton.jit
def largest_of_tiles(values, S: tl.constexpr):
    """The largest magnitude of each tile, as patterns."""
    largest = tl.abs(values)
    if S.tile_width > 1:
        largest = largest_along(tl.reshape(largest, (S.height, S.width // S.tile_width, S.tile_width)), 2)
    if S.tile_height > 1:
        ALONG: tl.constexpr = S.width // S.tile_width
        largest = largest_along(tl.reshape(largest, (S.height // S.tile_height, S.tile_height, ALONG)), 1)
    return largest.to(tl.int32, bitcast=True)


@triton.jit
def spread(tiles, S: tl.constexpr):
    """Broadcast one value per tile to each of its elements."""
    DOWN: tl.constexpr = S.height // S.tile_height
    ALONG: tl.constexpr = S.width // S.tile_width
    if S.tile_width > 1:
        tiles = tl.reshape(tl.broadcast_to(tiles[:, :, None], (DOWN, ALONG, S.tile_width)), (DOWN, S.width))
    if S.tile_height > 1:
        tiles = tl.reshape(tl.broadcast_to(tiles[:, None, :], (DOWN, S.tile_height, S.width)), (S.height, S.width))
    return tiles


@triton.jit
def store_scales(out, scales, at, m, S: tl.constexpr):
    """Write the scales of a region's tiles."""
    row = at.row // S.tile_height + tl.arange(0, S.height // S.tile_height)
    column = at.column // S.tile_width + tl.arange(0, S.width // S.tile_width)
    place = ((at.matrix * m.down + row) * m.along)[:, None] + column[None, :]
    tl.store(out + place, scales, mask=(row < m.down)[:, None] & (column < m.along)[None, :])


@triton.jit
def restoring_factors(scales, under, RESTORE: tl.constexpr):
    """The factors that rounded elements are multiplied by again, from their own scales."""
    if RESTORE == ALL and under is not None:
        scales = under_whole(scales, under)
    return scales


@triton.jit
def divided(values, inverses, V: tl.constexpr):
    """Values times the inverses of their scales."""
    quotients = values * inverses
    if V.mode == UP or V.mode == DOWN or V.mode == ODD:
        bits = kept_from_zero(quotients.to(tl.int32, bitcast=True), values.to(tl.int32, bitcast=True))
        quotients = bits.to(tl.float32, bitcast=True)
    return quotients


@triton.jit
def round_region(
    values, inverses, factors, reach, out, at, m, offset, rounding,
    V: tl.constexpr, S: tl.constexpr, RESTORE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Round the values of a region under scales broadcast over it, and write them; for `CLAMP` see `saturation`."""
    drawn = integers_of_rows(rounding.noise, offset + at.first, V, S.run, S.aligned, S.width)
    # NaN is made canonical when it is stored.
    result = rounded(divided(values, inverses, V), drawn, rounding.grid, V, False).to(tl.float32)
    if RESTORE != NOTHING:
        result *= factors
        if CLAMP == ALWAYS:
            result = clamped(result, out.dtype.element_ty)
    if CLAMP == BY_TENSOR:
        if reach > largest_finite(out.dtype.element_ty):
            store_region(out, narrowed(clamped(result, out.dtype.element_ty), out.dtype.element_ty), at, m, S)
        else:
            store_region(out, narrowed(result, out.dtype.element_ty), at, m, S)
    else:
        store_region(out, narrowed(result, out.dtype.element_ty), at, m, S)


@kernel(do_not_specialize_on_alignment=["seed_pointer", "under"])
def tiles_kernel(
    x, out, scales, under, seed_pointer, seed: tl.int64, noise_stream: tl.int64, offset: tl.int64,
    m: Matrices, signs: tl.int64, apart: tl.int64, used: UsedBits, grid: GridNumbers, making: MakingNumbers, scale_grid: GridNumbers,
    V: tl.constexpr, M: tl.constexpr, G: tl.constexpr, T: tl.constexpr, S: tl.constexpr, RESTORE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Round matrices under the scales of their tiles, and write these too. `apart` is 1 if each is under a scale of its own."""
    rounding = rounding_of(seed_pointer, seed, noise_stream, used, grid, V.wide)
    making = scale_numbers(making, scale_grid, G)
    at = region_place(tl.program_id(0), m, S)
    if under is not None:
        under += at.matrix * apart
    values = hadamard(as_single(load_region(x, at, m, S)), signs.to(tl.int32), T, S.height, S.width)
    made, inverses = tile_scales(largest_of_tiles(values, S), under, making, M, G)
    if scales is not None:
        store_scales(scales, made, at, m, S)
    factors = spread(restoring_factors(made, under, RESTORE), S)
    reach = reach_of(under, making, G) if CLAMP == BY_TENSOR else 0.0
    round_region(values, spread(inverses, S), factors, reach, out, at, m, offset, rounding, V, S, RESTORE, CLAMP)


@triton.jit
def scales_of_region(scales, at, m, S: tl.constexpr, ACROSS: tl.constexpr):
    """The given scale of each element of a region; 1 outside the matrix."""
    row = at.row + tl.arange(0, S.height)
    column = at.column + tl.arange(0, S.width)
    base = ((0 if ACROSS else at.matrix) * m.down + (row * 0 if S.tile_height == 0 else row // S.tile_height)) * m.along
    if S.tile_width == 0:
        given = tl.load(scales + base, mask=row < m.rows, other=1)
        given = tl.broadcast_to(given[:, None], (S.height, S.width))
    else:
        place = base[:, None] + (column // S.tile_width)[None, :]
        given = tl.load(scales + place, mask=(row < m.rows)[:, None] & (column < m.columns)[None, :], other=1)
    return given


@kernel(do_not_specialize_on_alignment=["seed_pointer", "scales", "under"])
def scaled_kernel(
    x, out, scales, under, seed_pointer, seed: tl.int64, noise_stream: tl.int64, offset: tl.int64,
    m: Matrices, signs: tl.int64, apart: tl.int64, used: UsedBits, grid: GridNumbers,
    V: tl.constexpr, T: tl.constexpr, S: tl.constexpr, RESTORE: tl.constexpr, CLAMP: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Round matrices under given scales; see `tiles_kernel`."""
    rounding = rounding_of(seed_pointer, seed, noise_stream, used, grid, V.wide)
    at = region_place(tl.program_id(0), m, S)
    if under is not None:
        under += at.matrix * apart
    values = hadamard(as_single(load_region(x, at, m, S)), signs.to(tl.int32), T, S.height, S.width)
    given = scales_of_region(scales, at, m, S, ACROSS)
    factors = restoring_factors(given, under, RESTORE)
    round_region(values, inverses_of(given, under), factors, 0.0, out, at, m, offset, rounding, V, S, RESTORE, CLAMP)
