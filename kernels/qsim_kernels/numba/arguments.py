"""Tensors, random bits and roundings as the loops take them.

Tensors are contiguous float32 or bfloat16. A rounding is the loop for a strip of elements, and the address of its numbers.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from qsim_kernels.numba.jobs import IN_FLOATS, LoopRounding, StoredValues, StripNumbers, kept_address
from qsim_kernels.numba.native import Native
from qsim_kernels.numbers.buckets import UNFIT, buckets_of
from qsim_kernels.numbers.carrier import SINGLE, GridBits, RoundingNumbers, bits_that_matter, name_of, used_bits, variant_of
from qsim_kernels.numbers.grid import Mode, Noise, NoiseNumbers, Rule
from qsim_kernels.numbers.tables import steps_of
from qsim_kernels.torch.rounding import rounds_by_addition
from qsim_kernels.torch.tables import loop_table, rounding_table

STORED = (torch.float32, torch.bfloat16)


def readable(x: Tensor) -> Tensor:
    """A tensor that loops read, or a copy of it."""
    return (x if x.dtype in STORED else x.to(torch.float32)).contiguous()


def writable(out: Tensor) -> Tensor:
    """A tensor that loops write, or another one in its place."""
    return out if out.dtype in STORED and out.is_contiguous() else torch.empty(out.shape, dtype=torch.float32, device=out.device)


def in_memory_order(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Permute dimensions into the order in which elements lie in memory, as channels-last images do, if they lie alike in all tensors.

    Loops that draw nothing may take elements in any order, and so need no copies.
    """
    strides = tensors[0].stride()
    if all(x.is_contiguous() for x in tensors) or any(x.stride() != strides for x in tensors):
        return tensors
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    permuted = tuple(x.permute(order) for x in tensors)
    return permuted if permuted[0].is_contiguous() else tensors


def held(x: Tensor) -> StoredValues:
    """The values of such a tensor."""
    return StoredValues(x.data_ptr(), x.element_size() == 2)


def loop_noise(noise: Noise) -> NoiseNumbers:
    """The source of random bits as loops take it."""
    seed, stream, offset = noise
    return NoiseNumbers(0 if seed is None else int(seed), stream, offset)


#: Tables of at most this many steps of bisection are compared with as a whole: 16 values in 0.6 of the time, and 32 in as much or more.
_FEW_STEPS = 4
_CPU = torch.device("cpu")


@cache
def strip(grid: GridBits, rule: Rule) -> LoopRounding:
    """The rounding of strips onto a grid in float32's bits."""
    module, way, buckets = _way(grid, rule)
    loop = Native(module, way + name_of(variant_of(grid, rule)), 7)
    return LoopRounding(loop.address, kept_address(StripNumbers(numbers(grid, rule), bits_that_matter(grid, rule) <= 16, buckets)))


def _way(grid: GridBits, rule: Rule) -> tuple[str, str, int]:
    """The module of a rounding's loop, how its name begins, and the address of a table's buckets or 0."""
    if grid.table:
        return _way_of_table(grid, rule)
    return "strips", IN_FLOATS if _rounds_in_floats(grid, rule) else "", 0


def _rounds_in_floats(grid: GridBits, rule: Rule) -> bool:
    """Whether a loop in which floats round is a faster way to the same results; see `loops.strips`."""
    # The largest magnitude of unsigned values takes the place of the smallest value's, which is zero.
    if not grid.signed:
        grid = grid._replace(bottom=grid.top)
    if rounds_by_addition(grid, rule):
        return True
    if rule.mode != Mode.STOCHASTIC or rule.correction or grid.top != grid.bottom or grid.limit(rule) >= SINGLE.infinity:
        return False
    mantissa = SINGLE.mantissa - grid.shift
    is_even = grid.low > mantissa and grid.least == grid.low - mantissa << SINGLE.mantissa
    # Positions must fit an int32, and what they are computed with a float32.
    return is_even and mantissa + 16 < 30 and grid.low > mantissa + 16


def _way_of_table(grid: GridBits, rule: Rule) -> tuple[str, str, int]:
    """See `loops.lookups`; positions do not suffice for a correction or another mode that draws."""
    if rule.draws and (rule.mode != Mode.STOCHASTIC or rule.correction):
        return "strips", "", 0
    steps, buckets = buckets_of(grid.table, rule).steps, loop_table(grid.table, rule)
    few = steps_of(grid.table, rule) <= _FEW_STEPS and all(inverse != UNFIT for inverse in buckets[-int(buckets[2]) :].tolist())
    return "lookups", "compared_" if few else f"bisected_{steps}_", buckets.data_ptr()


@cache
def row(kind: str, grid: GridBits, rule: Rule) -> LoopRounding:
    """The rounding of rows of float64 numbers, with an addition before it or without; see `loops.doubles`."""
    return LoopRounding(Native("doubles", f"{kind}_{name_of(variant_of(grid, rule))}", 6).address, kept_address(numbers(grid, rule)))


def numbers(grid: GridBits, rule: Rule) -> RoundingNumbers:
    """The numbers of a rounding onto a grid."""
    table = rounding_table(grid, rule, _CPU).data_ptr() if grid.table else 0
    return RoundingNumbers(grid.numbers(table), used_bits(grid.carrier, bits_that_matter(grid, rule), rule.correction))
