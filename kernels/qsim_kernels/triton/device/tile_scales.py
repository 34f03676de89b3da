"""Scales from the largest magnitudes of tiles, inside a kernel; as `arithmetic.scales` defines them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.meanings.triton import INTERPRETED, elements, scale_of
from qsim_kernels.numbers.carrier import double_bits
from qsim_kernels.numbers.grid import Grid, GridRounding
from qsim_kernels.numbers.scales import SMALLEST, ScaleNumbers, ScaleRule, Scales, rounding_of_scales, scale_numbers as numbers_of
from qsim_kernels.triton.device.directed import add_toward_zero
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.rounding import nearby_power
from qsim_kernels.triton.device.values import KernelVariant, as_double, in_carrier
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.launcher import Launch, launcher

#: Scales that a program computes.
_BLOCK = 128

inverse = elements.inverse
CEIL: tl.constexpr = tl.constexpr(int(ScaleRule.CEIL))
#: The bits of 1 as a float64.
ONE: tl.constexpr = tl.constexpr(double_bits(1.0))


class ScaleVariant(NamedTuple):
    """The compile-time variant of a kernel that computes scales.

    Attributes:
        rule: A `ScaleRule`.
        powers: Whether `powers_as_scales` applies.
        ratios: Whether `ratios_as_scales` applies.
    """

    rule: int
    powers: bool
    ratios: bool


@triton.jit
def scale_numbers(making, SCALE_ROUNDING: tl.constexpr):
    """`ScaleNumbers` with a grid in the carrier. In the interpreter a small integer is narrower than declared."""
    largest, factor, least = making.largest.to(tl.int64), making.factor.to(tl.int64), making.least.to(tl.int64)
    grid = in_carrier(making.grid, SCALE_ROUNDING.wide)
    return ScaleNumbers(largest, factor, making.power.to(tl.int64), making.spare.to(tl.int64), least, grid)


@triton.jit
def powers_as_scales(amax, making, RULE: tl.constexpr):
    """The scales and their inverses where scales are the powers of two from 2**-127 to 2**127, without arithmetic on floats.

    It takes a third of the instructions of `arithmetic.scales.scale_of`, which divides in float64.

    Args:
        amax: Largest magnitudes, as float32's bits.
        making: `ScaleNumbers`.
        RULE: A `ScaleRule`, `FLOOR` or `CEIL`.
    """
    bits = amax
    if RULE == CEIL:
        # Fractions beyond that of the largest value carry into the exponent.
        bits += 0x7FFFFF - ((making.largest >> 29).to(tl.int32) & 0x7FFFFF)
    exponent = (bits & -0x800000) + (making.power.to(tl.int32) << 23)
    exponent = tl.minimum(tl.maximum(exponent, 0), 0x7F000000)
    # The smallest is a subnormal number, half of the smallest normal one.
    scales, inverses = tl.maximum(exponent, 0x400000), tl.maximum(0x7F000000 - exponent, 0x400000)
    finite = amax < 0x7F800000
    scales = tl.where(finite, scales.to(tl.float32, bitcast=True), float("nan"))
    return scales, tl.where(finite, inverses.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def ratios_as_scales(a, under, making, RULE: tl.constexpr, SCALE_ROUNDING: tl.constexpr):
    """The values of a grid that are nearest to `a / (under * M)`, ties to even, or the smallest not below it: exact, in float32.

    A slightly inexact quotient, made slightly less, has the same neighbour below as the exact one, or the one before that; made slightly
    more, the same or the one behind that. So one comparison with a number between the neighbours, or with the one below, tells which of
    the two it is. One instruction computes the difference, with the exact one's sign.

    Args:
        a: Magnitudes, float32.
        under: A pointer to the scale of the whole tensor, or one for each magnitude.
        making: `ScaleNumbers`.
        RULE: A `ScaleRule`, `FIT` or `CEIL`.
        SCALE_ROUNDING: The `KernelVariant` of round-to-nearest onto the grid in float32.
    """
    whole = tl.load(under)
    # Tiny numbers are scaled up first, so that no difference vanishes, and huge ones down, so that no product overflows.
    lift = tl.where(whole < 5.421010862427522e-20, 18446744073709551616.0, 1.0)
    lift = tl.where(whole > 18446744073709551616.0, 5.421010862427522e-20, lift)
    whole *= lift
    a *= lift
    # Two to the margin divides by a subtraction of exponents.
    largest = as_double(making.largest - making.factor + ONE).to(tl.float32)
    quotient = a * (reciprocal(whole * largest) * (1.00000095367431640625 if RULE == CEIL else 0.99999904632568359375))
    y = tl.minimum(quotient, (making.grid.top - 1).to(tl.float32, bitcast=True))
    # The spacing is 2**-23 of this power, whose sum with a number in steps ends in the same bit as the number's code.
    power = nearby_power(y, making.grid, SCALE_ROUNDING, False).to(tl.float32, bitcast=True)
    total = add_toward_zero(y, power)
    below = total - power
    limit = below if RULE == CEIL else below + power * 5.960464477539063e-08
    if INTERPRETED:
        excess = a.to(tl.float64) - (limit * largest).to(tl.float64) * whole.to(tl.float64)
    else:
        excess = tl.fma(-limit * largest, whole, a)
    is_more = excess > 0
    if RULE != CEIL:
        is_more |= (excess == 0) & ((total.to(tl.int32, bitcast=True) & 1) != 0)
    return tl.where(is_more, below + power * 1.1920928955078125e-07, below)


@triton.jit
def reciprocal(x):
    """`arithmetic.scales.inverse` of float32 numbers: fewer instructions than a division."""
    if INTERPRETED:
        return inverse(x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tile_scales(bits, under, making, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr):
    """The scales of tiles, and the inverses of the divisors of elements.

    Args:
        bits: Largest magnitudes, as float32's bits.
        under: A pointer to the scale of the whole tensor, if they are under one.
        making: `ScaleNumbers`.
        MAKING: The `ScaleVariant`.
        SCALE_ROUNDING: The `KernelVariant` of rounding onto the scales' grid.
    """
    if MAKING.powers and under is None:
        scales, inverses = powers_as_scales(bits, making, MAKING.rule)
    else:
        amax = bits.to(tl.float32, bitcast=True)
        if MAKING.ratios and under is not None:
            smallest = as_double(making.least).to(tl.float32)
            scales = tl.maximum(ratios_as_scales(amax, under, making, MAKING.rule, SCALE_ROUNDING), smallest)
            whole = tl.load(under)
            scales = tl.where(amax < tl.where(whole == whole, float("inf"), float("nan")), scales, float("nan"))
        else:
            amax = amax.to(tl.float64)
            if under is not None:
                amax = amax / tl.load(under).to(tl.float64)
            bits = scale_of(amax.to(tl.int64, bitcast=True), 0, making, MAKING.rule, SCALE_ROUNDING)
            scales = bits.to(tl.float64, bitcast=True).to(tl.float32)
        inverses = inverses_of(scales, under)
    return scales, inverses


@triton.jit
def inverses_of(scales, under):
    """The factors that replace division of elements by their scale and by that of the whole tensor."""
    if under is not None:
        scales = under_whole(scales, under)
    return reciprocal(scales)


@triton.jit
def under_whole(scales, under):
    """Multiply scales by the scale of the whole tensor: `arithmetic.scales.under_whole` in two instructions."""
    return tl.minimum(scales * tl.load(under), 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@kernel(do_not_specialize_on_alignment=["under"])
def scales_kernel(
    amaxes, out, under, count: tl.int64, each: tl.int64, making: ScaleNumbers,
    MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the scales that result from `count` largest magnitudes, `each` of which are under one scale."""
    making = scale_numbers(making, SCALE_ROUNDING)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(amaxes + place, mask=place < count, other=0).to(tl.int32, bitcast=True)
    if under is not None:
        under += tl.minimum(place, count - 1) // each
    scales, _ = tile_scales(bits, under, making, MAKING, SCALE_ROUNDING)
    tl.store(out + place, scales, mask=place < count)


def scales_into(out: Tensor, amaxes: Tensor, under: Tensor | None, scales: Scales) -> None:
    """Write the scales that result from float32 magnitudes; see `reference.scaling.scales_into`."""
    _prepared(scales, 0 if under is None else under.numel(), out.shape)(amaxes.contiguous(), out, under)


@lru_cache(maxsize=4096)
def _prepared(scales: Scales, unders: int, shape: torch.Size) -> Launch:
    is_under, count = unders > 0, shape.numel()
    variants, numbers = making_of(scales, is_under)
    run = launcher(scales_kernel, (is_under,), *numbers, *variants, _BLOCK)
    return Launch(run, -(-count // _BLOCK), (count, max(count // max(unders, 1), 1)))


@lru_cache(maxsize=1024)
def making_of(scales: Scales, is_under: bool) -> tuple[tuple[ScaleVariant, KernelVariant], tuple[int, ...]]:
    """The variant and the runtime numbers of a kernel that computes scales.

    Args:
        scales: How scales are made.
        is_under: Whether they are under a scale of the whole tensor.
    """
    ratios = is_under and _is_of_ratios(scales)
    rule = rounding_of_scales(ScaleRule.FIT if ratios else scales.rule)
    rounding, (*grid, _, _) = arguments.rounding(GridRounding(scales.grid, rule), not ratios)
    *numbers, _ = numbers_of(scales)
    return (ScaleVariant(scales.rule, not is_under and _is_of_powers(scales), ratios), rounding), (*numbers, *grid)


def _is_of_powers(scales: Scales) -> bool:
    """Whether `powers_as_scales` applies: it underestimates subnormal magnitudes, which must not matter."""
    exponent = math.frexp(scales.largest)[1] - 1
    simple = scales.least == SMALLEST and scales.rule in (ScaleRule.FLOOR, ScaleRule.CEIL) and scales.margin < exponent
    return simple and is_e8m0(scales.grid)


def is_e8m0(grid: Grid) -> bool:
    """Whether a grid holds exactly the powers of two from 2**-127 to 2**127."""
    return grid.mantissa == 0 and not grid.zero and (grid.least, grid.max) == (2.0**-127, 2.0**127)


def _is_of_ratios(scales: Scales) -> bool:
    """Whether `ratios_as_scales` applies: a midpoint times `M` must be a float32, and scales far from float32's own limits."""
    grid = scales.grid
    variant, _ = arguments.rounding(GridRounding(grid, rounding_of_scales(ScaleRule.FIT)), False)
    fraction, _ = math.frexp(scales.largest)
    bits = next(bits for bits in range(1, 54) if math.ldexp(fraction, bits).is_integer())
    near = grid.least >= 2.0**-40 and grid.max <= 2.0**40 and 2.0**-40 <= scales.largest <= 2.0**40
    # What is lost of tiny magnitudes must not matter.
    supported = scales.rule == ScaleRule.FIT or (scales.rule == ScaleRule.CEIL and scales.least >= grid.least)
    return supported and variant.fast and not variant.only_powers and grid.mantissa + 2 + bits <= 24 and near
