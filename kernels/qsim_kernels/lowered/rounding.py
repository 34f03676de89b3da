"""Rounding without random bits as elementwise arithmetic on bit patterns, which compilers fuse."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.lowered import inductor
from qsim_kernels.lowered.fusible import fusible, in_memory
from qsim_kernels.numbers.carrier import DOUBLE, GridBits, grid_bits, variant_of
from qsim_kernels.numbers.grid import Grid, Mode, Rule, read
from qsim_kernels.torch.rounding import as_values, round_bits, rounds_by_addition


def quantize(x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, offset: int, dtype: torch.dtype) -> Tensor | None:
    """Round element by element; return None if that needs random bits or a table."""
    return _quantize(x, grid, rule, dtype) if is_elementwise(grid, rule) else None


def is_elementwise(grid: str, rule: str) -> bool:
    """Whether rounding is arithmetic on the elements only: without random bits, and without a table in memory."""
    return read(Rule, rule).mode != Mode.STOCHASTIC and not read(Grid, grid).table


def onto(x: Tensor, grid: str, rule: str, dtype: torch.dtype) -> Tensor:
    """Round elements onto a grid."""
    values = grid_bits(read(Grid, grid), wide=torch.float64 in (x.dtype, dtype))
    return as_values(rounded(patterns(x, values), values, read(Rule, rule)), values, dtype)


_quantize = fusible("quantize_fused(Tensor x, str grid, str rule, ScalarType dtype) -> Tensor")(onto)


def rounded(bits: Tensor, values: GridBits, rule: Rule) -> Tensor:
    """Round bit patterns of the carrier without random bits."""
    if rounds_by_addition(values, rule) or not inductor.writes_loops(bits):
        return round_bits(bits, values, rule)
    from qsim_kernels.meanings import inductor as meaning  # imports Inductor

    result: Tensor = meaning.rounding(values.carrier).round_bits(bits, None, values, variant_of(values, rule))
    return result


def quantize_and_sum(x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Round a matrix element by element and sum its rows; return None if that needs random bits or a table."""
    if not is_elementwise(grid, rule):
        return None
    held = in_memory(x)
    return _quantize(held, grid, rule, dtype), held.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def patterns(x: Tensor, values: GridBits) -> Tensor:
    """A tensor's values as bit patterns of a carrier."""
    if x.dtype == torch.float64:
        return x.view(torch.int64)
    bits = single_patterns(x)
    return bits.view(torch.float32).to(torch.float64).view(torch.int64) if values.carrier == DOUBLE else bits


def single_patterns(x: Tensor) -> Tensor:
    """Values of at most 32 bits as bit patterns of float32.

    16-bit values are read as integers, because a compiler may keep computed values in float32 until their bits are read.
    """
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).to(torch.int32) << 16
    if x.dtype == torch.float16:
        return _widened(x.view(torch.int16).to(torch.int32))
    return x.view(torch.int32)


def _widened(half: Tensor) -> Tensor:
    """Convert float16's bit patterns, given as int32, to float32's."""
    magnitude = half & 0x7FFF
    normal = (magnitude << 13) + (112 << 23)
    subnormal = (magnitude.to(torch.float32) * 2.0**-24).view(torch.int32)
    infinite = magnitude << 13 | 0x7F800000
    wide = torch.where(magnitude < 0x400, subnormal, torch.where(magnitude < 0x7C00, normal, infinite))
    return wide | half & -0x8000 << 16
