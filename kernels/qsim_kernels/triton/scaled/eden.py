"""Rounding to nearest under corrected scales, in one read: an override of `torch.basis`, which sums in float64.

Here float32 decides wherever its error cannot matter to the rounding of a scale; elsewhere the program sums in float64, too.

A large layer in `quartet2` went from 9.1 to 1.49 times as long as without rounding on an H100. `test_eden` compares results.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import SINGLE, GridNumbers, RoundingNumbers
from qsim_kernels.numbers.grid import GridRounding, NoiseNumbers
from qsim_kernels.numbers.scales import ScaleCorrection, Scales, rounding_of_scales
from qsim_kernels.torch.basis import SMALLEST
from qsim_kernels.triton.device.noise import random_integers
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, load_in_basis, region_place, store_from_basis
from qsim_kernels.triton.device.rounding import rounded_magnitudes
from qsim_kernels.triton.device.values import in_carrier, rounding_of
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.launcher import Launch
from qsim_kernels.triton.scaled.basis import RegionsInBasis, form_of, regions_of
from qsim_kernels.triton.scaled.partition import ScaledCall
from qsim_kernels.triton.scaled.tiles import largest_of_tiles, quotients_of_any, signed, spread, sums_of_tiles


class CorrectionNumbers(NamedTuple):
    """The numbers of scales under one of the tensor as kernels take them: float32's bits.

    Attributes:
        reach: The largest scale.
        largest: What the largest magnitude of a tile becomes.
        least: The smallest scale of a tensor.
    """

    reach: Any
    largest: Any
    least: Any


@triton.jit
def as_single_number(bits):
    """A float32 from its bits as an integer."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def scale_of_tensor(of_tensor, numbers):
    """The scale of a tensor with a given largest magnitude."""
    whole = tl.div_rn(tl.div_rn(of_tensor, as_single_number(numbers.reach)), as_single_number(numbers.largest))
    return tl.maximum(tl.where(whole == 0, 1.0, whole), as_single_number(numbers.least))


@triton.jit
def corrections(quotients, elements, GROUPS: tl.constexpr):
    """The factor by which each group's elements are too small on average, in float32; computed in the dtype of the quotients."""
    wanted, found = sums_of_tiles(quotients * quotients, GROUPS), sums_of_tiles(quotients * elements.to(quotients.dtype), GROUPS)
    return tl.where(found == 0, 1.0, wanted / tl.where(found == 0, 1.0, found)).to(tl.float32)


@triton.jit
def per_tile(groups, REGION: tl.constexpr, GROUPS: tl.constexpr):
    """Broadcast one value per group to each of its tiles."""
    TILES: tl.constexpr = GROUPS.tile_width // REGION.tile_width
    shape: tl.constexpr = (REGION.height, REGION.width // GROUPS.tile_width, TILES)
    return tl.reshape(tl.broadcast_to(groups[:, :, None], shape), (REGION.height, REGION.width // REGION.tile_width))


@kernel(do_not_specialize_on_alignment=["flips", "seed_pointer"])
def eden_kernel(
    x, out, largest, flips, seed_pointer, source: NoiseNumbers, matrices: Matrices, signs: tl.int64, correction: CorrectionNumbers,
    numbers: RoundingNumbers, nearest_scale_grid: GridNumbers, grid: GridNumbers,
    CORRECTED: tl.constexpr, SCALE_ROUNDING: tl.constexpr, ROUNDING: tl.constexpr, TURN: tl.constexpr,
    REGION: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Round a region to nearest, correct the scales of its groups, and round these.

    Args:
        CORRECTED: The `KernelVariant` of corrected scales.
        SCALE_ROUNDING: That of scales.
        ROUNDING: That of elements.
        TURN: The transform of the values.
        REGION: The `RegionShape`.
        GROUPS: The same, with groups for tiles.
    """
    corrected = rounding_of(seed_pointer, source.seed, source.stream, numbers, CORRECTED.wide)
    nearest_scale_grid, grid = in_carrier(nearest_scale_grid, SCALE_ROUNDING.wide), in_carrier(grid, ROUNDING.wide)
    at = region_place(tl.program_id(0), matrices, REGION)
    of_tensor = tl.load(largest)
    whole = scale_of_tensor(of_tensor, correction)
    values = load_in_basis(x, flips, at, matrices, signs, TURN, REGION)
    amax = largest_of_tiles(values, REGION).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(tl.div_rn(amax, amax * 0 + as_single_number(correction.largest)), amax * 0 + whole)
    scales = rounded_magnitudes(ratio, 0, nearest_scale_grid, SCALE_ROUNDING)
    scales = tl.where(scales == 0, 1.0, scales)
    quotients = quotients_of_any(tl.abs(values), scales * whole, REGION)
    elements = rounded_magnitudes(quotients, 0, grid, ROUNDING)
    TILES: tl.constexpr = REGION.width // REGION.tile_width
    first = source.offset + at.first // REGION.tile_width
    drawn = random_integers(corrected.noise, first, CORRECTED, 8, REGION.aligned and TILES % 8 == 0, TILES)
    # A sum of as many products is off by less than 2**-24 of it for each.
    SLACK: tl.constexpr = (2 * GROUPS.tile_width + 4) * 2.0**-24
    wanted = scales * per_tile(corrections(quotients, elements, GROUPS), REGION, GROUPS)
    made = rounded_magnitudes(wanted * (1 - SLACK), drawn, corrected.grid, CORRECTED)
    above = rounded_magnitudes(wanted * (1 + SLACK), drawn, corrected.grid, CORRECTED)
    if tl.max(tl.max((made != above).to(tl.int32), axis=1), axis=0) > 0:
        exact = scales * per_tile(corrections(quotients.to(tl.float64), elements, GROUPS), REGION, GROUPS)
        made = rounded_magnitudes(exact, drawn, corrected.grid, CORRECTED)
    # Whatever the blocks, a tensor with a number that is not finite becomes NaN.
    factor = tl.where(of_tensor < float("inf"), whole, float("nan"))
    store_from_basis(out, signed(elements, values), spread(made * factor, REGION), flips, at, matrices, signs, TURN, REGION)


@lru_cache(maxsize=4096)
def prepared(call: ScaledCall, scales: Scales, correction: ScaleCorrection) -> tuple[Launch, RegionsInBasis] | None:
    """Prepare a launch for groups of one row that regions hold, and usual roundings; none where plain torch computes."""
    elements, tiles = call.elements, call.tiles
    regions = regions_of(call, correction.size, scales) if tiles.height == 1 and correction.size % tiles.width == 0 else None
    rules = correction.rule, rounding_of_scales(scales.rule), elements.rule
    grids = scales.grid, scales.grid, elements.grid
    found = [arguments.rounding(GridRounding(*how), False) for how in zip(grids, rules, strict=True)]
    # All random bits are drawn at once: to draw some later, a thread must hold eight numbers, and it holds fewer scales.
    variants, (numbers, (*scale_grid, _, _), (*grid, _, _)) = zip(*found, strict=True)
    if regions is None or regions[0].shape.width % correction.size or not all(map(arguments.rounds_magnitudes, variants)):
        return None
    cut, read = regions
    tail = (*numbers, *scale_grid, *grid, *variants, read.turn, cut.shape._replace(tile_width=tiles.width), cut.shape)
    of_tensor = map(SINGLE.pattern, (correction.reach, scales.largest, SMALLEST / scales.grid.least))
    return cut.launch(eden_kernel, form_of(call), tail, read.signs, *of_tensor), regions
