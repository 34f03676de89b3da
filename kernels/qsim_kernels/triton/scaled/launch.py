"""Launches of the kernels that round under scales or only transform, from the operators' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qsim_kernels.numbers.grid import Mode, Noise
from qsim_kernels.numbers.scales import Restore, ScaledRounding, ScaleRule, Scales, TileSizes, Turn
from qsim_kernels.torch import runs, scaling as reference
from qsim_kernels.torch.hadamard import hadamard as hadamard_in_torch
from qsim_kernels.torch.scaling import NO_NOISE
from qsim_kernels.triton.device import tile_scales
from qsim_kernels.triton.device.parts import store_part
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.regions import Matrices, load_transformed, region_part, region_place
from qsim_kernels.triton.device.saturation import Clamp, clamp_of_given, clamp_of_tiles
from qsim_kernels.triton.device.scaled_pairs import NearestForm, ScaledForm, TurnedForm
from qsim_kernels.triton.host import arguments
from qsim_kernels.triton.host.launcher import Launch
from qsim_kernels.triton.quantize.launch import quantize_into
from qsim_kernels.triton.scaled import best, both_ways, eden, nested, rescaling
from qsim_kernels.triton.scaled.amaxes import amaxes_into
from qsim_kernels.triton.scaled.basis import quantize_in_basis
from qsim_kernels.triton.scaled.pairs import pairs_kernel
from qsim_kernels.triton.scaled.partition import (
    Reading,
    ScaledCall,
    call_of,
    cut,
    cut_ahead,
    cut_between_tiles,
    cut_into,
    cut_into_blocks,
    cut_into_pairs,
    pair_signs,
    reading,
    reading_ahead,
)
from qsim_kernels.triton.scaled.tiles import scaled_kernel, tiles_kernel
from qsim_kernels.triton.scaled.turned import turned_kernel
from qsim_kernels.triton.scaled.whole import whole_scale_into
from qsim_kernels.triton.scaled.whole_turned import turned_amaxes_into, turned_scale_into

#: Elements of a region of whole rows, and columns of one of columns.
_ELEMENTS, _WIDE = 1024, 64


rescaled_into, matmul_rescaled_into = rescaling.rescaled_into, rescaling.matmul_rescaled_into


def scales_into(
    out: Tensor, amaxes: Tensor, under: Tensor | None, scales: Scales, noise: Noise = NO_NOISE, tiles: TileSizes | None = None
) -> None:
    """Write the scales that result from the largest magnitudes; see `reference.scaling.scales_into`."""
    if scales.draws or amaxes.dtype == torch.float64:
        reference.scales_into(out, amaxes, under, scales, noise, tiles)
    else:
        tile_scales.scales_into(out, amaxes, under, scales)


def scales_of_tiles_into(
    out: Tensor,
    x: Tensor,
    under: Tensor | None,
    tiles: TileSizes,
    turn: Turn | None,
    finite: bool,
    making: Scales,
    noise: Noise = NO_NOISE,
) -> None:
    """Write the scales of a tensor's tiles; see `reference.scaling.scales_of_tiles_into`."""
    is_computed = under is None and not making.draws
    if is_computed and turn is None and _is_whole(tiles, x.shape, x.dtype):
        whole_scale_into(out, x, making, finite)
    elif not is_computed or turn is None or not turned_scale_into(out, x, tiles, turn, finite, making):
        reference.scales_of_tiles_into(out, x, under, tiles, turn, finite, making, noise, amaxes_into, scales_into)


@lru_cache(maxsize=4096)
def _is_whole(tiles: TileSizes, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether a nonempty tensor is one tile that can be read in any order, without float64."""
    return dtype != torch.float64 and tiles.counts(shape.numel()) == (1, 1, 1)


def quantize_tiles_into(
    out: Tensor, scales: Tensor | None, x: Tensor, under: Tensor | None, making: Scales, rounding: ScaledRounding
) -> None:
    """Round `x` under the scales of its tiles; see `reference.scaling.quantize_tiles_into`."""
    if not x.numel():
        return
    call, noise = call_of(out, x, rounding, under)
    launch = _on_tiles(call, making, kept=scales is not None)
    if launch is None:
        _quantize_tiles_in_turn(out, scales, x, under, making, rounding)
        return
    _launch_on_tiles(launch, out, scales, x, under, None, noise)


def _launch_on_tiles(
    launch: Launch,
    out: Tensor,
    scales: Tensor | None,
    x: Tensor,
    under: Tensor | None,
    held: Tensor | None,
    noise: tuple[Any, ...],
    ahead: Tensor | None = None,
) -> None:
    kernel = launch.launcher.kernel
    written, found = (scales,) if kernel is tiles_kernel else (), () if kernel is turned_kernel else (ahead,)
    launch(x.contiguous(), out, *written, under, held, *found, *noise)


def quantize_tiles_and_amaxes_into(
    out: Tensor, amaxes: Tensor, x: Tensor, under: Tensor | None, making: Scales, rounding: ScaledRounding, tiles: TileSizes, turn: Turn
) -> None:
    """Round `x` and find magnitudes of its transform in one read; see `reference.quantize_tiles_and_amaxes_into`."""
    call, noise = call_of(out, x, rounding, under)
    ahead = reading_ahead(call, tiles, turn)
    launch = None if ahead is None else _on_tiles(call, making, ahead, kept=False)
    if launch is None:
        reference.quantize_tiles_and_amaxes_into(out, amaxes, x, under, making, rounding, tiles, turn, quantize_tiles_into, amaxes_into)
    else:
        _launch_on_tiles(launch, out, None, x, under, None, noise, amaxes)


def quantize_both_ways_into(outs: Sequence[Tensor], x: Tensor, making: Scales, roundings: Sequence[ScaledRounding]) -> None:
    """Round `x` in blocks along rows and along columns; see `reference.quantize_both_ways_into`."""
    one, other = roundings
    call, _ = call_of(outs[0], x, one)
    launch = both_ways.prepared(call, other.tiles, making)
    if launch is None:
        reference.quantize_both_ways_into(outs, x, making, roundings, quantize_tiles_into)
    else:
        launch(x.contiguous(), *outs)


def quantize_runs_into(out: Tensor, x: Tensor, held: Tensor, under: Tensor | None, making: Scales, rounding: ScaledRounding) -> None:
    """Round runs of rows under the scales of their tiles, in place of `runs.quantize_runs_into`'s copies."""
    call, noise = call_of(out, x, rounding, under, held=held)
    launch = _on_tiles(call, making, kept=False) if x.numel() else None
    if launch is None:
        runs.quantize_runs_into(out, x, held, under, making, rounding, hadamard, quantize_tiles_into)
    else:
        _launch_on_tiles(launch, out, None, x, under, held, noise)


def amaxes_of_runs_into(out: Tensor, x: Tensor, held: Tensor, tiles: TileSizes, turn: Turn | None, finite: bool) -> None:
    """Write the largest magnitude of each tile of runs of rows; see `runs.amaxes_of_runs_into`."""
    if not turned_amaxes_into(out, x, held, tiles, turn, finite):
        runs.amaxes_of_runs_into(out, x, held, tiles, turn, finite, hadamard, amaxes_into)


quantize_best_into = partial(quantize_in_basis, best.prepared, partial(reference.quantize_best_into, quantize=quantize_into))
quantize_eden_into = partial(quantize_in_basis, eden.prepared, partial(reference.quantize_eden_into, quantize=quantize_into))
quantize_nested_into = partial(quantize_in_basis, nested.prepared, partial(reference.quantize_nested_into, quantize=quantize_tiles_into))


def quantize_scaled_into(out: Tensor, x: Tensor, scales: Tensor, under: Tensor | None, rounding: ScaledRounding) -> None:
    """Round `x` under given scales; see `reference.scaling.quantize_scaled_into`."""
    if not x.numel():
        return
    call, noise = call_of(out, x, rounding, under)
    launch = _under_given(call)
    if launch is None:
        if rounding.turn is None or x.dtype == torch.float64:
            reference.quantize_scaled_into(out, x, scales, under, rounding)
        else:
            quantize_scaled_into(out, hadamard(x, rounding.turn), scales, under, rounding._replace(turn=None))
        return
    launch(x.contiguous(), out, scales, under, *noise)


def _quantize_tiles_in_turn(
    out: Tensor, scales: Tensor | None, x: Tensor, under: Tensor | None, making: Scales, rounding: ScaledRounding
) -> None:
    """Read a tensor several times: where plain torch transforms it first, or where tiles do not fit into regions."""
    tiles, turn = rounding.tiles, rounding.turn
    if x.dtype == torch.float64:
        reference.quantize_tiles_into(out, scales, x, under, making, rounding)
    elif turn is not None and reading(x.numel(), x.dtype, tiles, turn) is None:
        quantize_tiles_into(out, scales, hadamard(x, turn), under, making, rounding._replace(turn=None))
    else:
        if scales is None:
            scales = x.new_empty(tiles.counts(x.numel()), dtype=torch.float32)
        scales_of_tiles_into(scales, x, under, tiles, turn, False, making, rounding.noise)
        quantize_scaled_into(out, x, scales, under, rounding)


@lru_cache(maxsize=4096)
def _on_tiles(call: ScaledCall, making: Scales, ahead: Reading | None = None, *, kept: bool) -> Launch | None:
    """Prepare a launch of `pairs_kernel` or `tiles_kernel`, unless several reads are necessary, or scales are drawn in between.

    Args:
        call: The call.
        making: How scales are made.
        ahead: The reading of which magnitudes are found, too.
        kept: Whether scales are written.
    """
    if making.draws:
        return None
    read, (source, target) = call.reading, call.types
    in_pairs = None if kept or read is None else _in_pairs(call, making, read, ahead)
    if in_pairs is not None or read is None:
        return in_pairs
    if ahead is None:
        regions, signs = cut_between_tiles(read, call.types, call.elements, call.aligned, making, joins_rows=call.joins_rows), read.signs
    else:
        regions, signs, read = cut_ahead(ahead, read.tiles.width, call.aligned), pair_signs(ahead), ahead
    if regions is None:
        return None
    is_under = call.wholes > 0
    clamp = clamp_of_tiles(making, call.elements, is_under, source if call.turn is None else torch.float32, target)
    variant, numbers = call.rounding
    making_variants, making_numbers = tile_scales.making_of(making, is_under)
    constants = (variant, *making_variants, read.turn, regions.shape, int(call.elements.restore), int(clamp))
    form = (source, target, is_under, call.unseeded, kept, call.in_runs, ahead is None)
    return regions.launch(tiles_kernel, form, (*numbers, *making_numbers, *constants), signs, int(call.wholes > 1))


def _in_pairs(call: ScaledCall, making: Scales, read: Reading, ahead: Reading | None) -> Launch | None:
    """Prepare a launch of `pairs_kernel`, or of `turned_kernel`, if it supports the dtypes, the rounding and the tiles."""
    (variant, numbers), is_under, is_turned = call.rounding, call.wholes > 0, read.turn.levels > 0
    if ahead is None:
        regions = (cut_into_blocks if is_turned else cut_into_pairs)(read, joins_rows=call.joins_rows)
    else:
        regions = cut_ahead(ahead, read.tiles.width, call.aligned, each=2)
    if regions is None or not call.are_pairs or not arguments.has_scaled_pairs(variant, call.elements.grid):
        return None
    making_variants, making_numbers = tile_scales.making_of(making, is_under)
    are_powers = making_variants[0].powers
    if variant.mode == Mode.NEAREST and (is_turned or ahead is not None or not are_powers):
        return None
    kernel, pairs = turned_kernel if is_turned else pairs_kernel, _form_of_pairs(call, making, read, are_powers=are_powers)
    read, form = ahead or read, (is_under, call.unseeded, call.in_runs, ahead is None)
    constants = (variant, *making_variants, read.turn, regions.shape, int(call.elements.restore), pairs, *pairs.code)
    return regions.launch(kernel, form, (*numbers, *making_numbers, *constants), pair_signs(read), int(call.wholes > 1))


def _form_of_pairs(call: ScaledCall, making: Scales, read: Reading, *, are_powers: bool) -> ScaledForm | TurnedForm | NearestForm:
    """The form of a rounding of pairs, given whether scales are computed as powers of two."""
    elements, is_under, is_turned = call.elements, call.wholes > 0, read.turn.levels > 0
    source = torch.float32 if is_turned else torch.bfloat16
    clamps = clamp_of_tiles(making, elements, is_under, source, torch.bfloat16) != Clamp.NEVER
    if elements.rule.mode == Mode.NEAREST:
        return NearestForm(clamps)
    # Products with E4M3's scales, for example, are bfloat16 numbers.
    is_short = making.grid.mantissa < 8 and making.grid.exponent >= -126
    is_exact = are_powers or (is_short and not clamps and not (is_under and elements.restore == Restore.ALL))
    clamps = clamps or not is_exact
    if not is_turned:
        return ScaledForm(divides_pairs=are_powers, multiplies_pairs=is_exact, clamps=clamps)
    is_within = are_powers and making.rule == ScaleRule.CEIL and making.margin >= 0 and making.largest >= 2
    return TurnedForm(multiplies_pairs=is_exact, clamps=clamps, in_quads=read.turn.down, is_within=is_within)


@lru_cache(maxsize=4096)
def _under_given(call: ScaledCall) -> Launch | None:
    """Prepare a launch of `scaled_kernel`, unless plain torch has to transform the tensor first, or to read float64."""
    read, elements = call.reading, call.elements
    if read is None:
        return None
    regions = cut(read, call.types, elements, call.aligned)
    variant, numbers = call.rounding
    constants = (variant, read.turn, regions.shape, int(elements.restore), int(clamp_of_given(elements)), read.tiles.across)
    form = (*call.types, call.wholes > 0, call.unseeded)
    return regions.launch(scaled_kernel, form, (*numbers, *constants), read.signs, int(call.wholes > 1))


@kernel()
def hadamard_kernel(x, out, matrices: Matrices, signs: tl.int64, TURN: tl.constexpr, REGION: tl.constexpr):
    """Write the transform of a region in float32."""
    at = region_place(tl.program_id(0), matrices, REGION)
    store_part(out, load_transformed(x, at, matrices, signs, TURN, REGION), region_part(at, matrices, REGION))


def hadamard(x: Tensor, turn: Turn) -> Tensor:
    """Transform a tensor; see `reference.hadamard.hadamard`."""
    launch = _transform(x.shape, x.dtype, turn)
    if launch is None:
        return hadamard_in_torch(x, turn)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    launch(x.contiguous(), out)
    return out


hadamard_of_runs = partial(runs.hadamard_of_runs, transform=hadamard)


@lru_cache(maxsize=4096)
def _transform(shape: torch.Size, source: torch.dtype, turn: Turn) -> Launch | None:
    """The launch; none for float64, for large blocks, and for shorter last blocks."""
    count = shape.numel()
    rows, columns = (turn.length, turn.inner) if turn.inner > 1 else (count // max(turn.length, 1), turn.length)
    read = reading(count, source, TileSizes(rows, columns, max(rows, 1), max(columns, 1), False), turn) if count else None
    if read is None:
        return None
    block = 1 << read.turn.levels
    wide = _WIDE if read.turn.down else min(_ELEMENTS, max(16, block, triton.next_power_of_2(columns)))
    tall = block if read.turn.down else min(_ELEMENTS // wide, triton.next_power_of_2(rows))
    regions = cut_into(count, (source, torch.float32), False, (rows, columns), (tall, wide), (0, 0), 1 if read.turn.down else 4)
    return regions.launch(hadamard_kernel, (source,), (read.turn, regions.shape), read.signs)
