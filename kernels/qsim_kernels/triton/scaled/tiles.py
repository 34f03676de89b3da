"""Rounding under scales inside a kernel: scales from a tile's largest magnitude, in the same read, or given scales."""

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import INTERPRETED, elements
from qsim_kernels.numbers.carrier import RoundingNumbers
from qsim_kernels.numbers.grid import NoiseNumbers
from qsim_kernels.numbers.scales import Restore, ScaleNumbers
from qsim_kernels.triton.device.blocks import larger, narrowed, rounded
from qsim_kernels.triton.device.noise import random_integers
from qsim_kernels.triton.device.parts import store_part
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, in_memory, load_region, load_transformed, region_part, region_place
from qsim_kernels.triton.device.rounding import DOWN, ODD, UP
from qsim_kernels.triton.device.saturation import ALWAYS, BY_TENSOR, clamped, largest_finite, reach_of
from qsim_kernels.triton.device.tile_scales import inverses_of, reciprocal, scale_numbers, tile_scales, under_whole
from qsim_kernels.triton.device.transforms import careful_from, write_ahead
from qsim_kernels.triton.device.values import rounding_of

NOTHING, ALL = (tl.constexpr(int(restore)) for restore in (Restore.NOTHING, Restore.ALL))
kept_from_zero = elements.kept_from_zero


@triton.jit
def largest_along(x, axis: tl.constexpr):
    """The largest of magnitudes along an axis, NaN if one is."""
    if INTERPRETED:
        # The largest pattern is that of a NaN, if there is one.
        return tl.max(x.to(tl.int32, bitcast=True), axis=axis).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(x, axis, larger)


@triton.jit
def largest_of_tiles(values, REGION: tl.constexpr):
    """The largest magnitude of each tile, as patterns."""
    largest = tl.abs(values)
    if REGION.tile_width > 1:
        largest = largest_along(tl.reshape(largest, (REGION.height, REGION.width // REGION.tile_width, REGION.tile_width)), 2)
    if REGION.tile_height > 1:
        ALONG: tl.constexpr = REGION.width // REGION.tile_width
        largest = largest_along(tl.reshape(largest, (REGION.height // REGION.tile_height, REGION.tile_height, ALONG)), 1)
    return largest.to(tl.int32, bitcast=True)


@triton.jit
def sums_of_tiles(errors, REGION: tl.constexpr):
    """The sum of each tile."""
    if REGION.tile_width > 1:
        errors = tl.sum(tl.reshape(errors, (REGION.height, REGION.width // REGION.tile_width, REGION.tile_width)), axis=2)
    if REGION.tile_height > 1:
        ALONG: tl.constexpr = REGION.width // REGION.tile_width
        errors = tl.sum(tl.reshape(errors, (REGION.height // REGION.tile_height, REGION.tile_height, ALONG)), axis=1)
    return errors


@triton.jit
def spread(tiles, REGION: tl.constexpr):
    """Broadcast one value per tile to each of its elements."""
    DOWN: tl.constexpr = REGION.height // REGION.tile_height
    ALONG: tl.constexpr = REGION.width // REGION.tile_width
    if REGION.tile_width > 1:
        tiles = tl.reshape(tl.broadcast_to(tiles[:, :, None], (DOWN, ALONG, REGION.tile_width)), (DOWN, REGION.width))
    if REGION.tile_height > 1:
        tiles = tl.reshape(tl.broadcast_to(tiles[:, None, :], (DOWN, REGION.tile_height, REGION.width)), (REGION.height, REGION.width))
    return tiles


@triton.jit
def store_scales(out, scales, at, matrices, REGION: tl.constexpr):
    """Write the scales of a region's tiles."""
    row = at.row // REGION.tile_height + tl.arange(0, REGION.height // REGION.tile_height)
    column = at.column // REGION.tile_width + tl.arange(0, REGION.width // REGION.tile_width)
    place = ((at.matrix * matrices.down + row) * matrices.along)[:, None] + column[None, :]
    tl.store(out + place, scales, mask=(row < matrices.down)[:, None] & (column < matrices.along)[None, :])


@triton.jit
def restoring_factors(scales, under, RESTORE: tl.constexpr):
    """The factors that rounded elements are multiplied by again, from their own scales."""
    if RESTORE == ALL and under is not None:
        scales = under_whole(scales, under)
    return scales


@triton.jit
def divided(values, inverses, ROUNDING: tl.constexpr):
    """Values times the inverses of their scales."""
    quotients = values * inverses
    if ROUNDING.mode == UP or ROUNDING.mode == DOWN or ROUNDING.mode == ODD:
        bits = kept_from_zero(quotients.to(tl.int32, bitcast=True), values.to(tl.int32, bitcast=True))
        quotients = bits.to(tl.float32, bitcast=True)
    return quotients


@triton.jit
def signed(magnitudes, values):
    """Magnitudes with the signs of values."""
    signs = values.to(tl.int32, bitcast=True) & -0x80000000
    return (magnitudes.to(tl.int32, bitcast=True) | signs).to(tl.float32, bitcast=True)


@triton.jit
def quotients_of(magnitudes, scales, REGION: tl.constexpr):
    """Magnitudes divided by the scales of their tiles, correctly rounded."""
    if INTERPRETED:
        return tl.div_rn(magnitudes, spread(scales, REGION))
    else:
        # A minus sign takes an instruction: one for a tile.
        inverses, divisors = spread(reciprocal(scales), REGION), spread(-scales, REGION)
        quotients = magnitudes * inverses
        # The first correction leaves an error below one in the last place, and the second none.
        quotients = tl.fma(tl.fma(quotients, divisors, magnitudes), inverses, quotients)
        return tl.fma(tl.fma(quotients, divisors, magnitudes), inverses, quotients)


@triton.jit
def quotients_of_any(magnitudes, scales, REGION: tl.constexpr):
    """`quotients_of` for any positive scales."""
    quotients = quotients_of(magnitudes, scales, REGION)
    if tl.min(tl.min(scales, axis=1), axis=0) < 8.673617379884035e-19:
        # Where residuals could underflow.
        quotients = tl.div_rn(magnitudes, spread(scales, REGION))
    return quotients


@triton.jit
def round_region(
    values, inverses, factors, reach, out, at, part, source, rounding,
    ROUNDING: tl.constexpr, REGION: tl.constexpr, RESTORE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Round the values of a region under scales broadcast over it, and write them in a part of memory; for `CLAMP` see `saturation`."""
    drawn = random_integers(rounding.noise, source.offset + at.first, ROUNDING, REGION.run, REGION.aligned, REGION.width)
    # NaN is made canonical when it is stored.
    result = rounded(divided(values, inverses, ROUNDING), drawn, rounding.grid, ROUNDING, False).to(tl.float32)
    if RESTORE != NOTHING:
        result *= factors
        if CLAMP == ALWAYS:
            result = clamped(result, out.dtype.element_ty)
    if CLAMP == BY_TENSOR:
        if reach > largest_finite(out.dtype.element_ty):
            store_part(out, narrowed(clamped(result, out.dtype.element_ty), out.dtype.element_ty), part)
        else:
            store_part(out, narrowed(result, out.dtype.element_ty), part)
    else:
        store_part(out, narrowed(result, out.dtype.element_ty), part)


@kernel(do_not_specialize_on_alignment=["seed_pointer", "under", "held", "ahead"])
def tiles_kernel(
    x, out, scales, under, held, ahead, seed_pointer, source: NoiseNumbers, matrices: Matrices, signs: tl.int64, apart: tl.int64,
    numbers: RoundingNumbers, making: ScaleNumbers,
    ROUNDING: tl.constexpr, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, TURN: tl.constexpr, REGION: tl.constexpr,
    RESTORE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Round matrices under the scales of their tiles, and write these too.

    `apart` is 1 if each is under a scale of its own; for `held` see `in_memory`. With `ahead`, values are rounded untransformed, and the
    transform is that of `write_ahead`.
    """
    rounding = rounding_of(seed_pointer, source.seed, source.stream, numbers, ROUNDING.wide)
    making = scale_numbers(making, SCALE_ROUNDING)
    at = region_place(tl.program_id(0), matrices, REGION)
    if under is not None:
        under += at.matrix * apart
    place, bounds = in_memory(at, matrices, held, REGION)
    # One warp decides faster than several, which would wait for each other.
    DECIDES: tl.constexpr = TURN.levels > 0 and not TURN.bounded and REGION.height * REGION.width <= 2048
    if ahead is None:
        values = load_transformed(x, place, bounds, signs, TURN, REGION, held is not None, not DECIDES)
    else:
        write_ahead(ahead, x, at.row, at.column // 2, matrices.columns // 2, signs, TURN, REGION.width // 2)
        values = load_region(x, at, matrices, REGION)
    largest = largest_of_tiles(values, REGION)
    if DECIDES and ahead is None:
        is_large = tl.max(tl.max(largest, axis=1), axis=0) >= careful_from(TURN, TURN.factor)
        if is_large:
            values = load_transformed(x, place, bounds, signs, TURN, REGION, held is not None)
            largest = largest_of_tiles(values, REGION)
    made, inverses = tile_scales(largest, under, making, MAKING, SCALE_ROUNDING)
    if scales is not None:
        store_scales(scales, made, at, matrices, REGION)
    factors = spread(restoring_factors(made, under, RESTORE), REGION)
    reach = reach_of(under, making, SCALE_ROUNDING) if CLAMP == BY_TENSOR else 0.0
    part = region_part(place, bounds, REGION)
    round_region(values, spread(inverses, REGION), factors, reach, out, at, part, source, rounding, ROUNDING, REGION, RESTORE, CLAMP)


@triton.jit
def scales_of_region(scales, at, matrices, REGION: tl.constexpr, ACROSS: tl.constexpr):
    """The given scale of each element of a region; 1 outside the matrix."""
    row = at.row + tl.arange(0, REGION.height)
    column = at.column + tl.arange(0, REGION.width)
    tile_row = row * 0 if REGION.tile_height == 0 else row // REGION.tile_height
    base = ((0 if ACROSS else at.matrix) * matrices.down + tile_row) * matrices.along
    if REGION.tile_width == 0:
        given = tl.load(scales + base, mask=row < matrices.rows, other=1)
        return tl.broadcast_to(given[:, None], (REGION.height, REGION.width))
    else:
        place = base[:, None] + (column // REGION.tile_width)[None, :]
        return tl.load(scales + place, mask=(row < matrices.rows)[:, None] & (column < matrices.columns)[None, :], other=1)


@kernel(do_not_specialize_on_alignment=["seed_pointer", "scales", "under"])
def scaled_kernel(
    x, out, scales, under, seed_pointer, source: NoiseNumbers, matrices: Matrices, signs: tl.int64, apart: tl.int64,
    numbers: RoundingNumbers,
    ROUNDING: tl.constexpr, TURN: tl.constexpr, REGION: tl.constexpr, RESTORE: tl.constexpr, CLAMP: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Round matrices under given scales; see `tiles_kernel`."""
    rounding = rounding_of(seed_pointer, source.seed, source.stream, numbers, ROUNDING.wide)
    at = region_place(tl.program_id(0), matrices, REGION)
    if under is not None:
        under += at.matrix * apart
    values = load_transformed(x, at, matrices, signs, TURN, REGION)
    given = scales_of_region(scales, at, matrices, REGION, ACROSS)
    factors = restoring_factors(given, under, RESTORE)
    part = region_part(at, matrices, REGION)
    round_region(values, inverses_of(given, under), factors, 0.0, out, at, part, source, rounding, ROUNDING, REGION, RESTORE, CLAMP)
