"""Rounding under the better of two scales for each tile, in one read: an override of `torch.basis`, which computes in float64.

Here float32 decides wherever its error cannot matter. Where it could, in the scales or in the comparison of some tile, the program computes
those in float64, too. Values are multiplied by a power of two that brings the scale of the tensor near 1, so that nothing underflows.

A large layer in `four_over_six` took 12 times as long as without rounding on an H100, now 1.42 to 1.46. `test_best` compares results.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import DOUBLE, GridNumbers, RoundingNumbers
from qsim_kernels.numbers.grid import GridRounding, NoiseNumbers
from qsim_kernels.numbers.scales import ScaleChoice, Scales, rounding_of_scales
from qsim_kernels.triton.device.blocks import rounded
from qsim_kernels.triton.device.noise import random_integers
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, load_in_basis, region_place, store_from_basis
from qsim_kernels.triton.device.rounding import rounded_magnitudes
from qsim_kernels.triton.device.tile_scales import reciprocal
from qsim_kernels.triton.device.values import as_double, in_carrier, rounding_of
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.launcher import Launch
from qsim_kernels.triton.scaled.basis import RegionsInBasis, form_of, regions_of
from qsim_kernels.triton.scaled.partition import ScaledCall
from qsim_kernels.triton.scaled.tiles import largest_of_tiles, quotients_of, signed, spread, sums_of_tiles


class ChoiceNumbers(NamedTuple):
    """The numbers of a choice as kernels take them: float64's bits.

    Attributes:
        reach: The largest scale times the largest value.
        first: The first candidate.
        second: The second.
        least: The smallest scale.
        count: The number of elements: as many random bits later, those of the second candidate begin.
    """

    reach: Any
    first: Any
    second: Any
    least: Any
    count: Any


class TensorScale(NamedTuple):
    """The scale of a tensor times a power of two, in float64, and that power in float32."""

    whole: Any
    lift: Any


@triton.jit
def tensor_scale(largest, reach):
    """The `TensorScale` of a tensor's largest magnitude."""
    whole = largest.to(tl.float64) / reach
    whole = tl.where(whole == 0, 1.0, whole)
    # The inverse of its power of two, if float32 has it.
    field = tl.minimum(tl.maximum((whole.to(tl.int64, bitcast=True) >> 52) - (1023 - 127), 1), 253)
    lift = ((254 - field) << 23).to(tl.int32).to(tl.float32, bitcast=True)
    return TensorScale(whole * lift.to(tl.float64), lift)


@triton.jit
def best_scales(amax, candidate, least, tensor, grid, SCALE_ROUNDING: tl.constexpr):
    """The scales under which tiles' largest magnitudes become a candidate, times `tensor.lift`."""
    ratio = amax * reciprocal((candidate * tensor.whole).to(tl.float32))
    # The error of the ratio is less than 2**-22 of it.
    below = rounded(ratio * 0.99999976158142090, 0, grid, SCALE_ROUNDING, False)
    above = rounded(ratio * 1.00000023841857910, 0, grid, SCALE_ROUNDING, False)
    if tl.max(tl.max((below != above).to(tl.int32), axis=1), axis=0) > 0:
        middle = (below + above) * 0.5
        even = rounded(middle, 0, grid, SCALE_ROUNDING, False)
        excess = amax.to(tl.float64) / candidate / tensor.whole - middle.to(tl.float64)
        below = tl.where(excess > 0, above, tl.where(excess < 0, below, even))
    scales = tl.maximum(below.to(tl.float64), least) * tensor.whole
    return tl.maximum(scales.to(tl.float32), tensor.lift * 1.1754943508222875e-38)


@triton.jit
def errors_of(difference, SQUARES: tl.constexpr, REGION: tl.constexpr):
    """The error of each tile."""
    return sums_of_tiles(difference * difference if SQUARES else tl.abs(difference), REGION)


@triton.jit
def fast_errors(elements, scales, magnitudes, SQUARES: tl.constexpr, REGION: tl.constexpr):
    """The error of each tile, without the rounding of elements times scales."""
    return errors_of(tl.fma(elements, spread(-scales, REGION), magnitudes), SQUARES, REGION)


@triton.jit
def exact_errors(elements, scales, magnitudes, SQUARES: tl.constexpr, REGION: tl.constexpr):
    """The error of each tile in float64."""
    return errors_of((elements * spread(scales, REGION)).to(tl.float64) - magnitudes.to(tl.float64), SQUARES, REGION)


@triton.jit
def second_is_better(first, first_scales, second, second_scales, magnitudes, amax, SQUARES: tl.constexpr, REGION: tl.constexpr):
    """Whether a tile has the smaller error under the second scales."""
    one = fast_errors(first, first_scales, magnitudes, SQUARES, REGION)
    other = fast_errors(second, second_scales, magnitudes, SQUARES, REGION)
    # A difference is rounded, squared, and added to others at most as often as there are elements. Without the rounding of a product it is
    # off by up to 2**-24 of the largest magnitude `a`, and the sum `e` of n squares by 2**-23 * a * sqrt(n * e), which is less than
    # 2**-18 * e + 2**-30 * n * a**2.
    COUNT: tl.constexpr = REGION.tile_height * REGION.tile_width
    BOUND: tl.constexpr = (COUNT + 4) * 2.0**-23 + 2.0**-17
    SLACK: tl.constexpr = COUNT * (2.0**-29 if SQUARES else 2.0**-22)
    is_close = (tl.abs(other - one) <= BOUND * (one + other) + SLACK * (amax * amax if SQUARES else amax)) & (one + other > 0)
    is_better = (other < one).to(tl.int32)
    if tl.max(tl.max(is_close.to(tl.int32), axis=1), axis=0) > 0:
        exact = exact_errors(first, first_scales, magnitudes, SQUARES, REGION)
        is_better = (exact_errors(second, second_scales, magnitudes, SQUARES, REGION) < exact).to(tl.int32)
    return is_better > 0


@kernel(do_not_specialize_on_alignment=["flips", "seed_pointer"])
def best_kernel(
    x, out, largest, flips, seed_pointer, source: NoiseNumbers, matrices: Matrices, signs: tl.int64, choice: ChoiceNumbers,
    numbers: RoundingNumbers, scale_grid: GridNumbers,
    ROUNDING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, TURN: tl.constexpr, REGION: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Round a region under the scales of each candidate, keep the better values of each tile, and transform them back.

    Args:
        ROUNDING: The `KernelVariant` of elements.
        SCALE_ROUNDING: That of scales.
        TURN: The transform of the values.
        REGION: The `RegionShape`.
        SQUARES: See `ScaleChoice`.
    """
    rounding = rounding_of(seed_pointer, source.seed, source.stream, numbers, ROUNDING.wide)
    scales_at = in_carrier(scale_grid, SCALE_ROUNDING.wide)
    at = region_place(tl.program_id(0), matrices, REGION)
    of_tensor = tl.load(largest)
    tensor = tensor_scale(of_tensor, as_double(choice.reach))
    values = load_in_basis(x, flips, at, matrices, signs, TURN, REGION) * tensor.lift
    magnitudes = tl.abs(values)
    amax = largest_of_tiles(values, REGION).to(tl.float32, bitcast=True)
    least = as_double(choice.least)
    first_scales = best_scales(amax, as_double(choice.first), least, tensor, scales_at, SCALE_ROUNDING)
    second_scales = best_scales(amax, as_double(choice.second), least, tensor, scales_at, SCALE_ROUNDING)
    drawn = random_integers(rounding.noise, source.offset + at.first, ROUNDING, REGION.run, REGION.aligned, REGION.width)
    first = rounded_magnitudes(quotients_of(magnitudes, first_scales, REGION), drawn, rounding.grid, ROUNDING)
    drawn = random_integers(rounding.noise, source.offset + choice.count + at.first, ROUNDING, REGION.run, REGION.aligned, REGION.width)
    second = rounded_magnitudes(quotients_of(magnitudes, second_scales, REGION), drawn, rounding.grid, ROUNDING)
    is_better = second_is_better(first, first_scales, second, second_scales, magnitudes, amax, SQUARES, REGION)
    # Whatever the blocks, a tensor with a number that is not finite becomes NaN.
    lowered = tl.where(of_tensor < float("inf"), 1 / tensor.lift, float("nan"))
    factors = spread(tl.where(is_better, second_scales, first_scales) * lowered, REGION)
    result = signed(tl.where(spread(is_better.to(tl.int32), REGION) > 0, second, first), values)
    store_from_basis(out, result, factors, flips, at, matrices, signs, TURN, REGION)


@lru_cache(maxsize=4096)
def prepared(call: ScaledCall, scales: Scales, choice: ScaleChoice) -> tuple[Launch, RegionsInBasis] | None:
    """Prepare a launch for two candidates, whole tiles in regions, and a usual rounding; none where plain torch computes."""
    elements, regions = call.elements, regions_of(call, call.tiles.width, scales)
    variant, numbers = arguments.rounding(GridRounding(elements.grid, elements.rule), False)
    is_usual = len(choice.candidates) == 2 and arguments.rounds_magnitudes(variant)
    if regions is None or not is_usual or call.tiles.rows % call.tiles.height:
        return None
    cut, read = regions
    scale_variant, (*scale_grid, _, _) = arguments.rounding(GridRounding(scales.grid, rounding_of_scales(scales.rule)), False)
    variant = arguments.drawn_later(variant, elements.grid, few_bits=False)
    number = DOUBLE.pattern
    first, second = map(number, choice.candidates)
    chosen = ChoiceNumbers(number(choice.reach * scales.largest), first, second, number(scales.least), call.shape.numel())
    constants = (variant, scale_variant, read.turn, cut.shape, choice.squares)
    return cut.launch(best_kernel, form_of(call), (*numbers, *scale_grid, *constants), read.signs, *chosen), regions
