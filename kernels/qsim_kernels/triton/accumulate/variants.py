"""The facts for which kernels of sums are compiled, and the numbers that they read of grids and roundings."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from qsim_kernels.meanings.triton import INTERPRETED
from qsim_kernels.numbers.carrier import DOUBLE, grid_bits
from qsim_kernels.numbers.grid import Grid, GridRounding, Mode, Overflow, Rule
from qsim_kernels.numbers.sums import LEAST_EXPONENT, SINGLE_GRID, AlignedSum, BlockScaledSum, Order, RoundedSum, TwoStepSum, is_single
from qsim_kernels.numbers.updates import own_grid
from qsim_kernels.triton.accumulate.aligned import AlignedVariant
from qsim_kernels.triton.accumulate.exact_groups import LEAST_SIZE, GroupsVariant
from qsim_kernels.triton.accumulate.rounded_steps import RoundedVariant, StepRounding
from qsim_kernels.triton.accumulate.two_step import TwoStepVariant
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.capabilities import supports_packed_16_bit

#: Bits of float32 to which a sum must be rounded at most, and the smallest step, so that two more bits are left for rounding to odd.
_MOST_MANTISSA, _LEAST_STEP = 21, 2.0**-147
#: Conversions of float32 that round to nearest, and the grids of their results.
_NATIVE = ((own_grid(torch.bfloat16), tl.bfloat16), (own_grid(torch.float16), tl.float16))
#: Mantissa bits of a grid whose values have zeros in the lower halves of their float64 patterns.
_MOST_STOCHASTIC = 19


@lru_cache(maxsize=256)
def aligned(adder: AlignedSum, single: bool, launches: int, promoted: bool, dpx: bool) -> tuple[AlignedVariant, tuple[int, ...]]:
    """An aligned sum, and the numbers of its grid."""
    variant, numbers = arguments.rounding(GridRounding(adder.grid, adder.rounding), True)
    is_single_range = adder.low == SINGLE_GRID.exponent and adder.grid.least == math.ldexp(1.0, -126 - adder.grid.mantissa)
    unit = AlignedVariant(
        _even(adder.block),
        adder.fraction,
        adder.low,
        variant,
        single,
        nearest=adder.mode == Mode.NEAREST,
        dropped=23 - adder.grid.mantissa if is_single_range else -1,
        promoted=promoted,
        launches=launches,
        unroll=8 if single else 4,
        dpx=dpx,
    )
    return unit, numbers[:-2]


def two_step(adder: TwoStepSum, wide: bool) -> TwoStepVariant:
    """A sum in two steps."""
    return TwoStepVariant(_even(adder.block), adder.fraction, adder.second, adder.apart, wide, unroll=4, dpx=supports_packed_16_bit())


def groups(adder: BlockScaledSum) -> GroupsVariant:
    """A sum of groups that are added exactly."""
    return GroupsVariant(
        max(LEAST_SIZE, 1 << (adder.group - 1).bit_length()), adder.block // adder.group, adder.fraction, adder.aligned.low
    )


def _even(block: int) -> int:
    """The number of products in a step, with padding."""
    return block + block % 2


def sums_in_single(adder: AlignedSum) -> bool:
    """Whether float32 holds a step's sum exactly: a product is below `2**(fraction + 2)` units, the running sum below half of that."""
    least_unit = math.ldexp(1.0, LEAST_EXPONENT - adder.fraction)
    return (4 * adder.block + 2) << adder.fraction <= 1 << 24 and least_unit >= SINGLE_GRID.least


@lru_cache(maxsize=256)
def rounded(adder: RoundedSum, draws: bool, promoted: bool) -> tuple[RoundedVariant, tuple[int, ...], tuple[int, ...]]:
    """A rounded sum, and the numbers of its roundings: of sums, and of products."""
    pairs = [GridRounding(adder.grid, adder.rule)]
    if adder.product is not None and adder.product_rule is not None:
        pairs.append(GridRounding(adder.product, adder.product_rule))
    wide = draws or not is_single(adder) or not all(_rounds_in_single(*pair) for pair in pairs)
    (of_sums, numbers), (product, product_numbers) = (_step_rounding(pair, wide) for pair in (pairs[0], pairs[-1]))
    roundings = adder.roundings if draws else 0
    variant = RoundedVariant(of_sums, product, len(pairs) > 1, adder.order == Order.KAHAN, wide, roundings, promoted)
    return variant, numbers, product_numbers


def _step_rounding(rounding: GridRounding, wide: bool) -> tuple[StepRounding, tuple[int, ...]]:
    variant, numbers = arguments.rounding(rounding, wide)
    return StepRounding(_native(*rounding, wide), _is_fast(*rounding, wide), variant), numbers


def _rounds_in_single(grid: Grid, rule: Rule) -> bool:
    """Whether rounding to odd in float32 comes before this rounding without changing its result, or float32's own addition does it."""
    if grid_bits(grid, wide=False).carrier == DOUBLE:
        return False
    step = min(grid.least, math.ldexp(1.0, grid.exponent - grid.mantissa))
    return _is_native(grid, rule, SINGLE_GRID) or (grid.mantissa <= _MOST_MANTISSA and step >= _LEAST_STEP)


def _is_native(grid: Grid, rule: Rule, values: Grid) -> bool:
    return grid == values and rule.mode == Mode.NEAREST and not rule.saturates


def _native(grid: Grid, rule: Rule, wide: bool) -> Any:
    """The dtype whose conversion from the carrier is a rounding, if there is one."""
    if wide:
        return None
    # The interpreter's conversions to 16 bits do not all round to nearest.
    known = ((SINGLE_GRID, tl.float32), *(() if INTERPRETED else _NATIVE))
    return next((language for values, language in known if _is_native(grid, rule, values)), None)


def _is_fast(grid: Grid, rule: Rule, wide: bool) -> bool:
    """Whether adding and subtracting a power of two rounds to a symmetric grid."""
    saturating, _ = arguments.rounding(GridRounding(grid, rule._replace(overflow=int(Overflow.SATURATE))), wide)
    if wide:
        is_even = grid_bits(grid, wide=True).low > 0 and saturating.symmetric and saturating.signed
        return rule.mode == Mode.STOCHASTIC and is_even and grid.mantissa <= _MOST_STOCHASTIC
    return saturating.fast and saturating.symmetric and (rule.saturates or rule.mode == Mode.NEAREST)
