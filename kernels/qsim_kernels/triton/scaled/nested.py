"""Rounding under scales of tiles that are under scales of groups, in one read: an override of `torch.scaling.quantize_nested_into`.

Plain torch reads a tensor a dozen times for this. `test_nested` compares results.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import SINGLE, RoundingNumbers
from qsim_kernels.numbers.grid import GridRounding, NoiseNumbers
from qsim_kernels.numbers.scales import ScaleGroups, ScaleNumbers, Scales
from qsim_kernels.triton.device.blocks import rounded
from qsim_kernels.triton.device.noise import random_integers
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, load_in_basis, region_place, store_from_basis
from qsim_kernels.triton.device.tile_scales import making_of, scale_numbers, tile_scales
from qsim_kernels.triton.device.values import rounding_of
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.launcher import Launch
from qsim_kernels.triton.scaled.basis import form_of, regions_of
from qsim_kernels.triton.scaled.partition import ScaledCall
from qsim_kernels.triton.scaled.tiles import divided, largest_of_tiles, quotients_of_any, signed, spread


@triton.jit
def group_scales(values, reach, GROUPS: tl.constexpr):
    """The scales of groups."""
    largest = largest_of_tiles(values, GROUPS).to(tl.float32, bitcast=True)
    scales = tl.div_rn(largest, largest * 0 + reach.to(tl.int32).to(tl.float32, bitcast=True))
    scales = tl.where(largest == float("inf"), largest, tl.where(scales == 0, 1.0, scales))
    return tl.maximum(scales, 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)


@kernel(do_not_specialize_on_alignment=["flips", "seed_pointer"])
def nested_kernel(
    x, out, largest, flips, seed_pointer, source: NoiseNumbers, matrices: Matrices, signs: tl.int64, reach: tl.int64,
    numbers: RoundingNumbers, making: ScaleNumbers,
    ROUNDING: tl.constexpr, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, TURN: tl.constexpr, REGION: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Round a region; `GROUPS` is its `RegionShape` with groups for tiles."""
    rounding = rounding_of(seed_pointer, source.seed, source.stream, numbers, ROUNDING.wide)
    making = scale_numbers(making, SCALE_ROUNDING)
    at = region_place(tl.program_id(0), matrices, REGION)
    values = load_in_basis(x, flips, at, matrices, signs, TURN, REGION)
    scales = group_scales(values, reach, GROUPS)
    quotients = signed(quotients_of_any(tl.abs(values), scales, GROUPS), values)
    made, inverses = tile_scales(largest_of_tiles(quotients, REGION), None, making, MAKING, SCALE_ROUNDING)
    drawn = random_integers(rounding.noise, source.offset + at.first, ROUNDING, REGION.run, REGION.aligned, REGION.width)
    result = rounded(divided(quotients, spread(inverses, REGION), ROUNDING), drawn, rounding.grid, ROUNDING, False)
    store_from_basis(out, result * spread(made, REGION), spread(scales, GROUPS), flips, at, matrices, signs, TURN, REGION)


@lru_cache(maxsize=4096)
def prepared(call: ScaledCall, making: Scales, groups: ScaleGroups) -> tuple[Launch, None] | None:
    """Prepare a launch for groups of one row that regions hold; none where plain torch computes, or draws scales."""
    elements, tiles, (above, reach) = call.elements, call.tiles, groups
    is_row = above.height == tiles.height == 1 and above.columns == tiles.columns and above.width % tiles.width == 0
    regions = regions_of(call, above.width, making) if is_row and reach < 2.0**100 and not making.draws else None
    variant, numbers = arguments.rounding(GridRounding(elements.grid, elements.rule), False)
    if regions is None or regions[0].shape.width % above.width or variant.wide:
        return None
    cut, read = regions
    variant = arguments.drawn_later(variant, elements.grid, few_bits=False)
    making_variants, making_numbers = making_of(making, False)
    constants = (variant, *making_variants, read.turn, cut.shape._replace(tile_width=tiles.width), cut.shape)
    return cut.launch(nested_kernel, form_of(call), (*numbers, *making_numbers, *constants), read.signs, SINGLE.pattern(reach)), None
