"""Rounding under scales of tiles that are under scales of groups, in one read: an override of `torch.scaling.quantize_nested_into`.

Plain torch reads a tensor a dozen times for this. `test_nested` compares results.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers.carrier import SINGLE, GridNumbers, UsedBits
from qsim_kernels.numbers.grid import GridRounding
from qsim_kernels.numbers.scales import ElementRounding, ScaledRounding, Scales, TileSizes, Turn
from qsim_kernels.torch import scaling as reference
from qsim_kernels.triton.device.blocks import rounded
from qsim_kernels.triton.device.noise import random_integers
from qsim_kernels.triton.device.parts import store_part
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, hadamard, load_region, narrowed, region_part, region_place, with_signs
from qsim_kernels.triton.device.tile_scales import MakingNumbers, making_of, scale_numbers, tile_scales
from qsim_kernels.triton.device.values import rounding_of
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.arguments import seed_of
from qsim_kernels.triton.host.launcher import Launch, launcher
from qsim_kernels.triton.scaled.partition import Types, cut_small, reading
from qsim_kernels.triton.scaled.tiles import divided, largest_of_tiles, quotients_of, spread


@triton.jit
def flipped(x, flips, TURN: tl.constexpr, REGION: tl.constexpr):
    """Values times 1 or -1 for each element of a block, if they are given."""
    if flips is not None:
        x = x * tl.load(flips + tl.arange(0, REGION.width) % (1 << TURN.levels))[None, :]
    return x


@triton.jit
def group_scales(values, reach, GROUPS: tl.constexpr):
    """The scales of groups."""
    largest = largest_of_tiles(values, GROUPS).to(tl.float32, bitcast=True)
    scales = tl.div_rn(largest, largest * 0 + reach.to(tl.int32).to(tl.float32, bitcast=True))
    scales = tl.where(largest == float("inf"), largest, tl.where(scales == 0, 1.0, scales))
    return tl.maximum(scales, 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)


@kernel(do_not_specialize_on_alignment=["seed_pointer", "flips"])
def nested_kernel(
    x, out, flips, seed_pointer, seed: tl.int64, noise_stream: tl.int64, offset: tl.int64,
    matrices: Matrices, signs: tl.int64, reach: tl.int64, used: UsedBits, grid: GridNumbers, making: MakingNumbers, scale_grid: GridNumbers,
    ROUNDING: tl.constexpr, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, TURN: tl.constexpr, REGION: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Round a region; `GROUPS` is its `RegionShape` with groups for tiles."""
    rounding = rounding_of(seed_pointer, seed, noise_stream, used, grid, ROUNDING.wide)
    making = scale_numbers(making, scale_grid, SCALE_ROUNDING)
    at = region_place(tl.program_id(0), matrices, REGION)
    values = flipped(load_region(x, at, matrices, REGION), flips, TURN, REGION)
    values = hadamard(values, signs, TURN, REGION.height, REGION.width)
    scales = group_scales(values, reach, GROUPS)
    quotients = quotients_of(values, scales, GROUPS)
    if tl.min(tl.min(scales, axis=1), axis=0) < 8.673617379884035e-19:
        # Where residuals could underflow.
        quotients = tl.div_rn(values, spread(scales, GROUPS))
    made, inverses = tile_scales(largest_of_tiles(quotients, REGION), None, making, MAKING, SCALE_ROUNDING)
    drawn = random_integers(rounding.noise, offset + at.first, ROUNDING, REGION.run, REGION.aligned, REGION.width)
    result = rounded(divided(quotients, spread(inverses, REGION), ROUNDING), drawn, rounding.grid, ROUNDING, False)
    result = result * spread(made, REGION) * spread(scales, GROUPS)
    result = with_signs(hadamard(result, signs * 0, TURN, REGION.height, REGION.width), signs, TURN, REGION.height, REGION.width)
    store_part(out, narrowed(flipped(result, flips, TURN, REGION), out.dtype.element_ty), region_part(at, matrices, REGION))


def quantize_nested_into(
    out: Tensor, x: Tensor, flips: Tensor | None, groups: TileSizes, reach: float, making: Scales, rounding: ScaledRounding
) -> None:
    """Round `x` under scales of tiles and groups; see `reference.quantize_nested_into`."""
    tiles, turn, elements, (seed, stream, offset) = rounding
    pointer, number = seed_of(seed, x)
    form = (groups, reach, making, tiles, turn, elements, flips is None, pointer is None, offset % 8 == 0)
    launch = _prepared(x.shape, (x.dtype, out.dtype), *form)
    if launch is None:
        reference.quantize_nested_into(out, x, flips, groups, reach, making, rounding)
        return
    launch(x.contiguous(), out, flips, pointer, number, stream, offset)


@lru_cache(maxsize=4096)
def _prepared(
    shape: torch.Size,
    types: Types,
    groups: TileSizes,
    reach: float,
    making: Scales,
    tiles: TileSizes,
    turn: Turn | None,
    elements: ElementRounding,
    unflipped: bool,
    unseeded: bool,
    aligned: bool,
) -> Launch | None:
    """Prepare a launch for groups of one row that regions hold; none where plain torch computes."""
    count = shape.numel()
    read = reading(count, types[0], tiles, turn) if count and torch.float64 not in types else None
    is_row = groups.height == tiles.height == 1 and groups.columns == tiles.columns and groups.width % tiles.width == 0
    if read is None or not is_row or tiles.columns % groups.width or reach >= 2.0**100:
        return None
    regions = cut_small(read._replace(tiles=read.tiles._replace(width=groups.width)), types, elements, aligned, making)
    variant, numbers = arguments.rounding(GridRounding(elements.grid, elements.rule), False)
    if regions is None or regions.shape.height > 1 or regions.shape.width % groups.width or variant.wide:
        return None
    variant = arguments.drawn_later(variant, elements.grid, few_bits=False)
    making_variants, making_numbers = making_of(making, False)
    shapes = regions.shape._replace(tile_width=tiles.width), regions.shape
    constants = (variant, *making_variants, read.turn._replace(bounded=not turn), *shapes)
    run = launcher(nested_kernel, (*types, unflipped, unseeded), *numbers, *making_numbers, *constants, **regions.options)
    return Launch(run, regions.programs, (*regions.matrices, read.signs, SINGLE.pattern(reach)))
