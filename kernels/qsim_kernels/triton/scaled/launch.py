"""Launches of the kernels that round under scales, from the operators' arguments."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.numbers.scales import ElementRounding, ScaledRounding, Scales, TileSizes, Turn
from qsim_kernels.torch import scaling as reference
from qsim_kernels.triton.device import tile_scales
from qsim_kernels.triton.device.saturation import clamp_of_given, clamp_of_tiles
from qsim_kernels.triton.device.values import KernelVariant
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.launcher import Launch, launcher
from qsim_kernels.triton.host.seeds import seed_of
from qsim_kernels.triton.scaled.amaxes import amaxes_into
from qsim_kernels.triton.scaled.partition import cut, cut_between_tiles, is_narrow, reading
from qsim_kernels.triton.scaled.rescaling import matmul_rescaled_into, rescaled_into
from qsim_kernels.triton.scaled.tiles import scaled_kernel, tiles_kernel
from qsim_kernels.triton.scaled.transforms import hadamard
from qsim_kernels.triton.scaled.whole import whole_scale_into

__all__ = [
    "amaxes_into",
    "hadamard",
    "matmul_rescaled_into",
    "quantize_scaled_into",
    "quantize_tiles_into",
    "rescaled_into",
    "scales_into",
    "scales_of_tiles_into",
]


def scales_into(out: Tensor, amaxes: Tensor, under: Tensor | None, scales: Scales) -> None:
    """Write the scales that result from the largest magnitudes; see `reference.scaling.scales_into`."""
    if amaxes.dtype == torch.float64:
        reference.scales_into(out, amaxes, under, scales)
    else:
        tile_scales.scales_into(out, amaxes, under, scales)


def scales_of_tiles_into(
    out: Tensor, x: Tensor, under: Tensor | None, tiles: TileSizes, turn: Turn | None, finite: bool, how: Scales
) -> None:
    """Write the scales of a tensor's tiles; see `reference.scaling.scales_of_tiles_into`."""
    if under is None and turn is None and _is_whole(tiles, x.shape, x.dtype):
        whole_scale_into(out, x, how, finite)
    else:
        reference.scales_of_tiles_into(out, x, under, tiles, turn, finite, how, amaxes_into, scales_into)


@lru_cache(maxsize=4096)
def _is_whole(tiles: TileSizes, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether a nonempty tensor is one tile that can be read in any order, without float64."""
    return dtype != torch.float64 and tiles.counts(shape.numel()) == (1, 1, 1)


def quantize_tiles_into(out: Tensor, scales: Tensor | None, x: Tensor, under: Tensor | None, making: Scales, how: ScaledRounding) -> None:
    """Round `x` under the scales of its tiles; see `reference.scaling.quantize_tiles_into`."""
    if not x.numel():
        return
    tiles, turn, elements, (seed, stream, offset) = how
    pointer, number = (None, 0) if seed is None else seed_of(seed, x)
    form = (x.shape, x.dtype, out.dtype, pointer is None, offset % 8 == 0)
    launch = _on_tiles(tiles, turn, making, elements, _unders(under), scales is not None, *form)
    if launch is None:
        _quantize_tiles_in_turn(out, scales, x, under, making, how)
        return
    run, programs, sizes = launch
    run(programs, x.contiguous(), out, scales, under, pointer, number, stream, offset, *sizes)


def quantize_scaled_into(out: Tensor, x: Tensor, scales: Tensor, under: Tensor | None, how: ScaledRounding) -> None:
    """Round `x` under given scales; see `reference.scaling.quantize_scaled_into`."""
    if not x.numel():
        return
    tiles, turn, elements, (seed, stream, offset) = how
    pointer, number = (None, 0) if seed is None else seed_of(seed, x)
    form = (x.shape, x.dtype, out.dtype, pointer is None, offset % 8 == 0)
    launch = _under_given(tiles, turn, elements, _unders(under), *form)
    if launch is None:
        if turn is None or x.dtype == torch.float64:
            reference.quantize_scaled_into(out, x, scales, under, how)
        else:
            quantize_scaled_into(out, hadamard(x, turn), scales, under, how._replace(turn=None))
        return
    run, programs, sizes = launch
    run(programs, x.contiguous(), out, scales, under, pointer, number, stream, offset, *sizes)


def _quantize_tiles_in_turn(
    out: Tensor, scales: Tensor | None, x: Tensor, under: Tensor | None, making: Scales, how: ScaledRounding
) -> None:
    """Read a tensor several times: where plain torch transforms it first, or where tiles do not fit into regions."""
    tiles, turn = how.tiles, how.turn
    if x.dtype == torch.float64:
        reference.quantize_tiles_into(out, scales, x, under, making, how)
    elif turn is not None and reading(x.numel(), x.dtype, tiles, turn) is None:
        quantize_tiles_into(out, scales, hadamard(x, turn), under, making, how._replace(turn=None))
    else:
        if scales is None:
            scales = x.new_empty(tiles.counts(x.numel()), dtype=torch.float32)
        scales_of_tiles_into(scales, x, under, tiles, turn, False, making)
        quantize_scaled_into(out, x, scales, under, how)


@lru_cache(maxsize=4096)
def _on_tiles(
    tiles: TileSizes,
    turn: Turn | None,
    how: Scales,
    elements: ElementRounding,
    unders: int,
    kept: bool,
    shape: torch.Size,
    source: torch.dtype,
    target: torch.dtype,
    unseeded: bool,
    aligned: bool,
) -> Launch | None:
    """Prepare a launch of `tiles_kernel`, unless several reads are necessary."""
    read, is_under = reading(shape.numel(), source, tiles, turn), unders > 0
    regions = read and cut_between_tiles(read, (source, target), elements, aligned, how, joins_rows=unders < 2)
    if read is None or regions is None:
        return None
    clamp = clamp_of_tiles(how, elements, is_under, source if turn is None else torch.float32, target)
    variant, numbers = _rounding(elements, source, target)
    making_variants, making_numbers = tile_scales.making_of(how, is_under)
    constants = (variant, *making_variants, read.turn, regions.shape, int(elements.restore), int(clamp))
    form = (source, target, is_under, unseeded, kept)
    run = launcher(tiles_kernel, form, *numbers, *making_numbers, *constants, **regions.options)
    return Launch(run, regions.programs, (*regions.matrices, read.signs, int(unders > 1)))


@lru_cache(maxsize=4096)
def _under_given(
    tiles: TileSizes,
    turn: Turn | None,
    elements: ElementRounding,
    unders: int,
    shape: torch.Size,
    source: torch.dtype,
    target: torch.dtype,
    unseeded: bool,
    aligned: bool,
) -> Launch | None:
    """Prepare a launch of `scaled_kernel`, unless plain torch has to transform the tensor first, or to read float64."""
    read, is_under = reading(shape.numel(), source, tiles, turn), unders > 0
    if read is None:
        return None
    regions = cut(read, (source, target), elements, aligned)
    variant, numbers = _rounding(elements, source, target)
    constants = (variant, read.turn, regions.shape, int(elements.restore), int(clamp_of_given(elements)), read.tiles.across)
    run = launcher(scaled_kernel, (source, target, is_under, unseeded), *numbers, *constants, **regions.options)
    return Launch(run, regions.programs, (*regions.matrices, read.signs, int(unders > 1)))


def _unders(under: Tensor | None) -> int:
    """The number of scales that others are under: one for the whole tensor, or one for each matrix."""
    return 0 if under is None else under.numel()


def _rounding(elements: ElementRounding, source: torch.dtype, target: torch.dtype) -> tuple[KernelVariant, tuple[int, ...]]:
    """The variant and numbers of the rounding; if more bytes are moved, all random bits are drawn at no extra cost."""
    variant, numbers = arguments.rounding(elements.grid, elements.rule, False)
    return (arguments.drawn_later(variant, elements.grid, few=False) if is_narrow(source, target) else variant), numbers
