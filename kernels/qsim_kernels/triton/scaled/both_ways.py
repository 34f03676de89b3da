"""Rounding in blocks along rows and in blocks along columns from one read: an override of two roundings by `tiles`.

Regions hold whole blocks of both directions.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import RoundingNumbers
from qsim_kernels.numbers.grid import Mode, NoiseNumbers
from qsim_kernels.numbers.scales import ScaleNumbers, Scales, TileSizes
from qsim_kernels.triton.device.parts import load_part, store_part
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, load_region, region_part, region_place
from qsim_kernels.triton.device.saturation import Clamp, clamp_of_tiles
from qsim_kernels.triton.device.scaled_pairs import NearestForm
from qsim_kernels.triton.device.tile_scales import making_of, scale_numbers, tile_scales
from qsim_kernels.triton.device.values import rounding_of
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.launcher import Launch
from qsim_kernels.triton.scaled.pairs import nearest_in_tiles, part_of_pairs
from qsim_kernels.triton.scaled.partition import ScaledCall, cut_into, reading
from qsim_kernels.triton.scaled.tiles import largest_of_tiles, round_region, spread

#: The elements of a region and its warps, found by experiment.
_REGION, _WARPS = 64 * 64, 4


@triton.jit
def round_in_tiles(
    values, out, at, matrices, rounding, making,
    ROUNDING: tl.constexpr, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, REGION: tl.constexpr, RESTORE: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """Round the values of a region under the scales of its tiles, without random bits, and write them."""
    scales, inverses = tile_scales(largest_of_tiles(values, REGION), None, making, MAKING, SCALE_ROUNDING)
    inverses, factors, part = spread(inverses, REGION), spread(scales, REGION), region_part(at, matrices, REGION)
    source = NoiseNumbers(0, 0, 0)
    round_region(values, inverses, factors, 0.0, out, at, part, source, rounding, ROUNDING, REGION, RESTORE, CLAMP)


@kernel()
def both_ways_kernel(
    x, out, other, matrices: Matrices, numbers: RoundingNumbers, making: ScaleNumbers,
    ROUNDING: tl.constexpr, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, REGION: tl.constexpr, OTHER: tl.constexpr,
    RESTORE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Round matrices under the scales of two kinds of tiles; `OTHER` is `REGION` with those of the second result."""
    rounding = rounding_of(None, 0, 0, numbers, ROUNDING.wide)
    making = scale_numbers(making, SCALE_ROUNDING)
    at = region_place(tl.program_id(0), matrices, REGION)
    values = load_region(x, at, matrices, REGION)
    round_in_tiles(values, out, at, matrices, rounding, making, ROUNDING, MAKING, SCALE_ROUNDING, REGION, RESTORE, CLAMP)
    round_in_tiles(values, other, at, matrices, rounding, making, ROUNDING, MAKING, SCALE_ROUNDING, OTHER, RESTORE, CLAMP)


@kernel()
def pairs_both_ways_kernel(
    x, out, other, matrices: Matrices, numbers: RoundingNumbers, making: ScaleNumbers,
    ROUNDING: tl.constexpr, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, REGION: tl.constexpr, OTHER: tl.constexpr,
    TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """The same of pairs to nearest; see `pairs_kernel`."""
    grid = rounding_of(None, 0, 0, numbers, ROUNDING.wide).grid
    making = scale_numbers(making, SCALE_ROUNDING)
    part = part_of_pairs(region_place(tl.program_id(0), matrices, REGION), matrices, REGION)
    pairs = load_part(x.to(tl.pointer_type(tl.int32)), part)
    first = nearest_in_tiles(pairs, making, grid, MAKING.rule, REGION, TEXT, CONSTRAINTS)
    store_part(out.to(tl.pointer_type(tl.int32)), first, part)
    second = nearest_in_tiles(pairs, making, grid, MAKING.rule, OTHER, TEXT, CONSTRAINTS)
    store_part(other.to(tl.pointer_type(tl.int32)), second, part)


@lru_cache(maxsize=4096)
def prepared(call: ScaledCall, other: TileSizes, making: Scales) -> Launch | None:
    """Prepare a launch for a call and other tiles, if these are blocks along rows and along columns that fit into regions."""
    one, (source, target) = call.tiles, call.types
    height, width = max(one.height, other.height), max(one.width, other.width)
    are_blocks = min(one.height, other.height) == min(one.width, other.width) == 1 and one.columns == other.columns
    are_powers = not (height & (height - 1) or width & (width - 1))
    if not (are_blocks and are_powers) or one.across or other.across or height * width > _REGION:
        return None
    read = reading(call.shape.numel(), source, max(one, other, key=lambda tiles: tiles.height), None)
    if read is None:
        return None
    variant, numbers = call.rounding
    making_variants, making_numbers = making_of(making, False)
    clamp = clamp_of_tiles(making, call.elements, False, source, target)
    fits = call.are_pairs and width >= 16 and read.tiles.columns % 32 == 0 and height * read.tiles.columns < 2**31
    is_nearest = variant.mode == Mode.NEAREST and making_variants[0].powers
    in_pairs = fits and is_nearest and arguments.has_scaled_pairs(variant, call.elements.grid)
    each = 2 if in_pairs else 1
    matrix, region = (read.tiles.rows, read.tiles.columns // each), (height, max(width, _REGION // height) // each)
    regions = cut_into(read.elements // each, call.types, call.aligned, matrix, region, (height, width // each), _WARPS)
    shapes = (regions.shape._replace(tile_height=tiles.height, tile_width=max(tiles.width // each, 1)) for tiles in (one, other))
    constants = (*numbers, *making_numbers, variant, *making_variants, *shapes)
    if in_pairs:
        return regions.launch(pairs_both_ways_kernel, (), (*constants, *NearestForm(clamps=clamp != Clamp.NEVER).code))
    return regions.launch(both_ways_kernel, call.types, (*constants, int(call.elements.restore), int(clamp)))
