"""Rounding of bfloat16 matrices under the scales of their tiles, two elements at a time: an override of `tiles`.

A region is one of pairs: its columns, and those of matrices and tiles, are counted in pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import RoundingNumbers
from qsim_kernels.numbers.grid import NoiseNumbers
from qsim_kernels.numbers.scales import ScaleNumbers
from qsim_kernels.triton.device.pairs import larger_pair
from qsim_kernels.triton.device.parts import Part, load_part, store_part
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, in_memory, region_place
from qsim_kernels.triton.device.rounding import NEAREST
from qsim_kernels.triton.device.scaled_pairs import nearest_pairs, pair_of, powers_of_pairs, rounded_pairs
from qsim_kernels.triton.device.shared_scales import scales_by_lanes
from qsim_kernels.triton.device.tile_scales import scale_numbers, tile_scales
from qsim_kernels.triton.device.transforms import write_ahead
from qsim_kernels.triton.device.values import rounding_of
from qsim_kernels.triton.scaled.tiles import restoring_factors, spread


@triton.jit
def largest_of_pairs(x, REGION: tl.constexpr, BY_COLUMN: tl.constexpr):
    """The largest magnitudes of each tile: those of first and of second elements, or twice the same if they are in one tile."""
    DOWN: tl.constexpr = REGION.height // REGION.tile_height
    if REGION.tile_height > 1:
        x = tl.reduce(tl.reshape(x, (DOWN, REGION.tile_height, REGION.width)), 1, larger_pair)
    if not BY_COLUMN:
        x = tl.reduce(tl.reshape(x, (DOWN, REGION.width // REGION.tile_width, REGION.tile_width)), 2, larger_pair)
        x = larger_pair(x, ((x >> 16) & 0xFFFF) | (x << 16))
    return x & 0x7FFF7FFF


@triton.jit
def first_pair(at, matrices):
    """The index of the first pair of a region."""
    return tl.multiple_of((at.matrix * matrices.rows + at.row) * matrices.columns + at.column, 16)


@triton.jit
def part_of_pairs(at, matrices, REGION: tl.constexpr):
    """The pairs of a region as a `Part`, whose places are 32-bit numbers: 64-bit ones would take more instructions than a rounding."""
    start = first_pair(at, matrices)
    columns = tl.multiple_of(matrices.columns.to(tl.int32), 16)
    row, column = tl.arange(0, REGION.height), tl.arange(0, REGION.width)
    # No more than there are in the region.
    rows = tl.minimum(matrices.rows - at.row, REGION.height).to(tl.int32)
    left = tl.multiple_of(tl.minimum(matrices.columns - at.column, REGION.width).to(tl.int32), 16)
    return Part(start, (row * columns)[:, None] + column[None, :], (row < rows)[:, None] & (column < left)[None, :], start)


@triton.jit
def factors_of_pairs(first, second, under, REGION: tl.constexpr, RESTORE: tl.constexpr, FORM: tl.constexpr):
    """The factors of rounded elements, from the scales of first and of second ones."""
    if FORM.multiplies_pairs:
        first = pair_of(first, second)
    else:
        first, second = restoring_factors(first, under, RESTORE), restoring_factors(second, under, RESTORE)
    return (spread(first, REGION),) if FORM.multiplies_pairs else (spread(first, REGION), spread(second, REGION))


@triton.jit
def nearest_in_tiles(pairs, making, grid, RULE: tl.constexpr, REGION: tl.constexpr, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr):
    """Round the pairs of a region to nearest under the scales of its tiles, which are powers of two."""
    scales, inverses = powers_of_pairs(largest_of_pairs(pairs, REGION, REGION.tile_width == 1), making, RULE)
    return nearest_pairs(pairs, spread(inverses, REGION), spread(scales, REGION), grid, TEXT, CONSTRAINTS)


@kernel(do_not_specialize_on_alignment=["seed_pointer", "under", "held", "ahead"])
def pairs_kernel(
    x, out, under, held, ahead, seed_pointer, source: NoiseNumbers, matrices: Matrices, signs: tl.int64, apart: tl.int64,
    numbers: RoundingNumbers, making: ScaleNumbers,
    ROUNDING: tl.constexpr, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, TURN: tl.constexpr, REGION: tl.constexpr,
    RESTORE: tl.constexpr, FORM: tl.constexpr, TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Round matrices under the scales of their tiles; see `tiles_kernel`."""
    BY_COLUMN: tl.constexpr = REGION.tile_width == 1
    rounding = rounding_of(seed_pointer, source.seed, source.stream, numbers, ROUNDING.wide)
    making = scale_numbers(making, SCALE_ROUNDING)
    at = region_place(tl.program_id(0), matrices, REGION)
    if under is not None:
        under += at.matrix * apart
    if ahead is not None:
        write_ahead(ahead, x, at.row, at.column, matrices.columns, signs, TURN, REGION.width)
    place, bounds = in_memory(at, matrices, held, REGION)
    part = part_of_pairs(place, bounds, REGION)
    pairs = load_part(x.to(tl.pointer_type(tl.int32)), part)
    if ROUNDING.mode == NEAREST:
        result = nearest_in_tiles(pairs, making, rounding.grid, MAKING.rule, REGION, TEXT, CONSTRAINTS)
    else:
        amax = largest_of_pairs(pairs, REGION, BY_COLUMN)
        if FORM.divides_pairs:
            scales, inverses = powers_of_pairs(amax, making, MAKING.rule)
            inverses, factors = (spread(inverses, REGION),), (spread(scales, REGION),)
        else:
            # Two threads hold the pairs of a tile.
            if REGION.tile_width == 8 and REGION.tile_height == 1:
                first, first_inverses = scales_by_lanes(amax << 16, under, making, MAKING, SCALE_ROUNDING)
            else:
                first, first_inverses = tile_scales(amax << 16, under, making, MAKING, SCALE_ROUNDING)
            second, second_inverses = first, first_inverses
            if BY_COLUMN:
                second, second_inverses = tile_scales(amax & -0x10000, under, making, MAKING, SCALE_ROUNDING)
            inverses = spread(first_inverses, REGION), spread(second_inverses, REGION)
            factors = factors_of_pairs(first, second, under, REGION, RESTORE, FORM)
        # Four pairs share a Philox block.
        block = (source.offset >> 3) + (first_pair(at, matrices) >> 2) + (part.places >> 2)
        result = rounded_pairs(pairs, block, rounding.noise, inverses, factors, rounding.grid, FORM, TEXT, CONSTRAINTS)
    store_part(out.to(tl.pointer_type(tl.int32)), result, part)
