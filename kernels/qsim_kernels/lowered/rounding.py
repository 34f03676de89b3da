"""Rounding as elementwise arithmetic on bit patterns, which compilers fuse: all that needs no random bits, and small tensors that do.

Eight elements share what is computed to draw random bits. In a loop that Inductor generates each computes it again: little for the GPU,
and less than to launch a kernel for a small tensor, and another one for its seed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.lowered import inductor, sizes
from qsim_kernels.lowered.fusible import fusible, in_memory
from qsim_kernels.numbers.carrier import DOUBLE, GridBits, bits_that_matter, rounding_bits, used_bits, variant_of
from qsim_kernels.numbers.grid import Grid, Rule, read
from qsim_kernels.torch.philox import ElementNoise
from qsim_kernels.torch.rounding import as_values, round_bits, rounded as tensor_rounded, rounds_by_addition


class Draws(NamedTuple):
    """The random bits of the elements of a tensor, each by itself.

    Attributes:
        where: The logical indices of the elements; `None` where nothing is drawn.
        seed: A 0-d tensor.
        stream: Their stream.
    """

    where: Tensor | None = None
    seed: Tensor | None = None
    stream: int = 0


def draws_of(x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, offset: int) -> Draws | None:
    """The random bits with which elements are rounded by themselves; `None` where that takes a table, or kernels draw them faster."""
    if read(Grid, grid).table:
        return None
    if not read(Rule, rule).draws:
        return Draws()
    are_numbers = isinstance(stream, int) and isinstance(offset, int)
    if seed is None or seed.device != x.device or not (are_numbers and sizes.is_small(x) and inductor.generates(x.device)):
        return None
    return Draws(torch.arange(x.numel(), device=x.device).view(x.shape) + offset, seed, stream)


def quantize(x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, offset: int, dtype: torch.dtype) -> Tensor | None:
    """Round element by element; return None where `draws_of` does."""
    draws = draws_of(x, seed, grid, rule, stream, offset)
    return None if draws is None else _quantize(x, *draws, grid, rule, dtype)


def onto(x: Tensor, where: Tensor | None, seed: Tensor | None, stream: int, grid: str, rule: str, dtype: torch.dtype) -> Tensor:
    """Round elements onto a grid."""
    how = read(Rule, rule)
    values = rounding_bits(read(Grid, grid), how, wide=torch.float64 in (x.dtype, dtype))
    bits, noise = patterns(x, values), None if where is None or seed is None else ElementNoise(seed, stream, where)
    return as_values(rounded(bits, values, how, noise), values, dtype)


_quantize = fusible("quantize_fused(Tensor x, Tensor? where, Tensor? seed, int stream, str grid, str rule, ScalarType dtype) -> Tensor")(
    onto
)


def rounded(bits: Tensor, values: GridBits, rule: Rule, noise: ElementNoise | None = None) -> Tensor:
    """Round bit patterns of the carrier."""
    if noise is None and (rounds_by_addition(values, rule) or not inductor.writes_loops(bits)):
        return round_bits(bits, values, rule)
    if noise is not None and isinstance(noise.where, Tensor):
        listed = noise._replace(where=noise.where.reshape(-1))
        return tensor_rounded(bits.reshape(-1), values, rule, listed).view(bits.shape)
    from qsim_kernels.meanings import inductor as meaning  # imports Inductor

    arithmetic, count, drawn = meaning.rounding(values.carrier), bits_that_matter(values, rule), None
    if noise is not None:
        from qsim_kernels.lowered.drawing import drawn_words

        drawn = arithmetic.random_bits(drawn_words(noise, count), used_bits(values.carrier, count, rule.correction))
    result: Tensor = arithmetic.round_bits(bits, drawn, values, variant_of(values, rule))
    return result


def quantize_and_sum(x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Round a matrix element by element and sum its rows; return None where `draws_of` does."""
    draws = draws_of(x, seed, grid, rule, stream, 0)
    if draws is None:
        return None
    held = in_memory(x)
    return _quantize(held, *draws, grid, rule, dtype), held.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


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
