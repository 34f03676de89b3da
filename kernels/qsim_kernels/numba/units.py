"""Sums of matrix units with scales or in two steps, in loops compiled by Numba, and the numbers that describe a unit to these loops."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from qsim_kernels.numba import rounding
from qsim_kernels.numba.jobs import GroupsJob, ProductJob, job_address, packed
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numbers.carrier import double_bits, grid_bits
from qsim_kernels.numbers.grid import Mode, Overflow, Rule
from qsim_kernels.numbers.sums import SINGLE_GRID, AlignedSum, BlockScaledSum, TwoStepSum
from qsim_kernels.torch.rounding import one_nan

#: The loop of products that are aligned and truncated.
ALIGNED = Loop("sums", "aligned")
_TWO_STEP, _EXACT_GROUPS = Loop("two_step", "two_step"), Loop("exact_groups", "exact_groups")
#: The exponent of zero, below those of all products.
_NONE = -4096


def add_in_unit(out: Tensor, a: Tensor, b: Tensor, how: BlockScaledSum | TwoStepSum, scales: tuple[Tensor, Tensor] | None) -> None:
    """Multiply matrices that are not empty; see `reference.sums.accumulate_into`."""
    result = torch.empty_like(out, dtype=torch.float64)
    if isinstance(how, BlockScaledSum) and how.exact:
        _add_groups(result, as_double(a), as_double(b.mT), how, scales)
    else:
        _add_products(result, as_double(a), as_double(b.mT), how, scales)
    out.copy_(result)
    out.copy_(one_nan(out))


def _add_products(out: Tensor, a: Tensor, b: Tensor, how: BlockScaledSum | TwoStepSum, scales: tuple[Tensor, Tensor] | None) -> None:
    """Sums whose operands contain their scales, if they have some: factors of the values, whose exponents are added."""
    rows, columns, length = out.shape[-2], out.shape[-1], a.shape[-1]
    operands, exponents = [a, b], [exponents_of(a, how.low_a), exponents_of(b, how.low_b)]
    if scales is not None:
        assert isinstance(how, BlockScaledSum)
        for i, x in enumerate(scales):
            factors = as_double(x).repeat_interleave(how.group, -1)[..., :length]
            exponents[i] += exponents_of(factors, how.low_scale)
            operands[i] = (operands[i] * factors).contiguous()
    loop, unit = (_TWO_STEP, _steps(how)) if isinstance(how, TwoStepSum) else (ALIGNED, _unit_numbers(how))
    where = [x.data_ptr() for x in (*operands, *exponents)]
    product = ProductJob(out.data_ptr(), where[0], where[1], where[2], where[3], rows, columns, length, 0, job_address(unit))
    loop.share(packed(product), a.numel() // length, columns * length)


def _add_groups(out: Tensor, a: Tensor, b: Tensor, how: BlockScaledSum, scales: tuple[Tensor, Tensor] | None) -> None:
    """Sums whose groups of products are added exactly."""
    rows, columns, length = out.shape[-2], out.shape[-1], a.shape[-1]
    groups = -(-length // how.group)
    if scales is None:
        factors = [x.new_ones((*x.shape[:-1], groups)) for x in (a, b)]
        exponents = [torch.zeros_like(x, dtype=torch.int16) for x in factors]
    else:
        factors = [as_double(x) for x in scales]
        exponents = [exponents_of(x, how.low_scale) for x in factors]
    operands = out.data_ptr(), a.data_ptr(), b.data_ptr()
    first, second, of_first, of_second = (x.data_ptr() for x in (*factors, *exponents))
    unit = job_address(_unit_numbers(how))
    job = GroupsJob(*operands, first, second, of_first, of_second, rows, columns, length, how.group, unit)
    _EXACT_GROUPS.share(packed(job), a.numel() // length, columns * length)


def as_double(x: Tensor) -> Tensor:
    """A tensor as the loops read it."""
    return x.detach().to(torch.float64).contiguous()


def exponents_of(x: Tensor, low: int) -> Tensor:
    """The exponents of numbers, at least `low`; that of infinities and NaN does not matter."""
    found = (x.view(torch.int64) >> 52 & 0x7FF) - 1023
    found = torch.where(x.isfinite(), found, low).clamp_(min=low)
    return torch.where(x == 0, _NONE, found).to(torch.int16)


@cache
def aligned_numbers(how: AlignedSum) -> bytes:
    """The numbers of a `loops.sums.AlignedParameters`."""
    end = math.ldexp(1.0, math.frexp(how.grid.max)[1])
    grid = rounding.numbers(grid_bits(how.grid, wide=True), Rule(how.mode, 0, False, int(Overflow.NONFINITE)))
    return packed((how.mode == Mode.NEAREST, double_bits(end), how.grid.exponent, how.block, how.fraction, *grid))


def _unit_numbers(how: BlockScaledSum) -> bytes:
    return aligned_numbers(AlignedSum(SINGLE_GRID, int(Mode.TOWARD_ZERO), how.block, how.fraction, how.low_a, how.low_b))


@cache
def _steps(how: TwoStepSum) -> bytes:
    return packed((how.block, how.fraction, how.second, how.apart))
