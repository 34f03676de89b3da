"""Launches of the kernels that round under scales, from the operators' arguments."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.grid import Grid, Rule
from qsim_kernels.reference import scaling as reference
from qsim_kernels.reference.hadamard import hadamard
from qsim_kernels.scales import ElementRounding, Restore, Scales, Tiles, Turn
from qsim_kernels.triton.device import making
from qsim_kernels.triton.device.hadamard import TurnVariant
from qsim_kernels.triton.device.regions import Shape
from qsim_kernels.triton.device.saturation import Clamp, clamp_of_given, clamp_of_tiles
from qsim_kernels.triton.device.values import Variant
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.launcher import Launcher
from qsim_kernels.triton.host.layouts import flat
from qsim_kernels.triton.quantize.launch import seed_of
from qsim_kernels.triton.scaled import amaxes
from qsim_kernels.triton.scaled.cuts import Prepared, cut, cut_between_tiles, is_narrow, prepared
from qsim_kernels.triton.scaled.rescaling import rescaled_into
from qsim_kernels.triton.scaled.tiles import scaled_kernel, tiles_kernel

__all__ = ["amaxes_into", "quantize_scaled_into", "quantize_tiles_into", "rescaled_into", "scales_into", "hadamard"]


def amaxes_into(out: Tensor, x: Tensor, tiles: Tiles, turn: Turn | None, finite: bool) -> None:
    """Write the largest magnitude of each tile; see `reference.scaling.amaxes_into`."""
    if x.dtype == torch.float64:
        reference.amaxes_into(out, x, tiles, turn, finite)
        return
    read = prepared(x, tiles, turn)
    amaxes.amaxes_into(out, *read, finite)


def scales_into(out: Tensor, amaxes: Tensor, under: Tensor | None, scales: Scales) -> None:
    """Write the scales that result from the largest magnitudes; see `reference.scaling.scales_into`."""
    if amaxes.dtype == torch.float64:
        reference.scales_into(out, amaxes, under, scales)
    else:
        making.scales_into(out, flat(amaxes), under, scales)


def quantize_tiles_into(
    out: Tensor,
    scales: Tensor | None,
    x: Tensor,
    under: Tensor | None,
    tiles: Tiles,
    turn: Turn | None,
    how: Scales,
    elements: ElementRounding,
) -> None:
    """Round `x` under the scales of its tiles; see `reference.scaling.quantize_tiles_into`."""
    if x.dtype == torch.float64:
        reference.quantize_tiles_into(out, scales, x, under, tiles, turn, how, elements)
        return
    if not x.numel():
        return
    read = prepared(x, tiles, turn)
    regions = cut_between_tiles(read, out, elements, how)
    if regions is None:
        # Tiles that do not fit into regions are measured first; then everything is read again.
        found = x.new_empty(tiles.counts(x.numel()), dtype=torch.float32)
        amaxes.amaxes_into(found, *read, False)
        scales = torch.empty_like(found) if scales is None else scales
        making.scales_into(scales, found, under, how)
        _round_scaled(out, scales, under, read, elements)
        return
    pointer, seed = seed_of(elements.seed, x)
    form = (under is not None, read.x.dtype, out.dtype, regions.warps, regions.registers)
    source = torch.float32 if turn is not None else x.dtype
    clamp = clamp_of_tiles(how, elements, under is not None, source, out.dtype)
    compiled_for = (read.turn, regions.shape, elements.restore, clamp, *form)
    launcher = _tiles_rounder(how, elements.grid, elements.rule, *compiled_for)
    given = (scales, under, *regions.matrices, pointer, seed, elements.stream, elements.offset, read.signs)
    launcher.launch(regions.programs, read.x, out, *given, absent=(pointer is None, under is None, scales is None))


def quantize_scaled_into(
    out: Tensor, x: Tensor, scales: Tensor, under: Tensor | None, tiles: Tiles, turn: Turn | None, elements: ElementRounding
) -> None:
    """Round `x` under given scales; see `reference.scaling.quantize_scaled_into`."""
    if x.dtype == torch.float64:
        reference.quantize_scaled_into(out, x, scales, under, tiles, turn, elements)
    elif x.numel():
        _round_scaled(out, scales, under, prepared(x, tiles, turn), elements)


def _round_scaled(out: Tensor, scales: Tensor, under: Tensor | None, read: Prepared, elements: ElementRounding) -> None:
    regions = cut(read, out, elements)
    pointer, seed = seed_of(elements.seed, read.x)
    form = (read.tiles.across, read.x.dtype, out.dtype, regions.warps, regions.registers)
    compiled_for = (read.turn, regions.shape, elements.restore, clamp_of_given(elements), *form)
    launcher = _scaled_rounder(elements.grid, elements.rule, *compiled_for)
    given = (scales, under, *regions.matrices, pointer, seed, elements.stream, elements.offset, read.signs)
    launcher.launch(regions.programs, read.x, out, *given, absent=(pointer is None, under is None))


@lru_cache(maxsize=4096)
def _tiles_rounder(
    how: Scales,
    grid: Grid,
    rule: Rule,
    turn: TurnVariant,
    shape: Shape,
    restore: Restore,
    clamp: Clamp,
    is_under: bool,
    source: torch.dtype,
    target: torch.dtype,
    warps: int,
    registers: int,
) -> Launcher:
    variant, numbers = _rounding(grid, rule, source, target)
    making_variants, making_numbers = making.making_of(how, is_under)
    constants = (variant, *making_variants, turn, shape, int(restore), int(clamp))
    return Launcher(tiles_kernel, (*numbers, *making_numbers), constants, 1, num_warps=warps, **_limit(registers))


@lru_cache(maxsize=4096)
def _scaled_rounder(
    grid: Grid,
    rule: Rule,
    turn: TurnVariant,
    shape: Shape,
    restore: Restore,
    clamp: Clamp,
    across: bool,
    source: torch.dtype,
    target: torch.dtype,
    warps: int,
    registers: int,
) -> Launcher:
    variant, numbers = _rounding(grid, rule, source, target)
    constants = (variant, turn, shape, int(restore), int(clamp), across)
    return Launcher(scaled_kernel, numbers, constants, 1, num_warps=warps, **_limit(registers))


def _rounding(grid: Grid, rule: Rule, source: torch.dtype, target: torch.dtype) -> tuple[Variant, tuple[int, ...]]:
    """The variant and numbers of the rounding; if more bytes are moved, all random bits are drawn at no extra cost."""
    variant, numbers = arguments.rounding(grid, rule, False)
    return (arguments.drawn_later(variant, grid, few=False) if is_narrow(source, target) else variant), numbers


def _limit(registers: int) -> dict[str, int]:
    return {"maxnreg": registers} if registers else {}
