"""Rounding under scales on processors, in loops compiled by Numba; bit for bit what `qsim_kernels.reference.scaling` does."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from qsim_kernels.carrier import SINGLE, plan
from qsim_kernels.compiled import quantize_into
from qsim_kernels.compiled.threads import in_parts
from qsim_kernels.compiled.tiles import amaxes_loop, divide_loop, restore_loop, scales_loop
from qsim_kernels.reference import scaling as reference
from qsim_kernels.reference.hadamard import turned
from qsim_kernels.reference.rounding import one_nan
from qsim_kernels.reference.scaling import rescaled_into, under_whole
from qsim_kernels.scales import Elements, Restore, Scales, Tiles, Turn

__all__ = ["amaxes_into", "quantize_scaled_into", "quantize_tiles_into", "rescaled_into", "scales_into", "turned"]

_quantize_scaled_wide = partial(reference.quantize_scaled_into, quantize=quantize_into)


def amaxes_into(out: Tensor, x: Tensor, tiles: Tiles, turn: Turn | None, finite: bool) -> None:
    """Writes the largest magnitude of each tile; see `reference.scaling.amaxes_into`."""
    if not out.numel():
        return
    if x.dtype == torch.float64 or not x.numel():
        reference.amaxes_into(out, x, tiles, turn, finite)
        return
    x = _stored(x if turn is None else turned(x, turn))
    (rows, columns, height, width, across), loop = tiles, amaxes_loop(x.dtype)
    matrices, tile_rows = x.numel() // (rows * columns), out.numel() // -(-columns // width)
    given = matrices, (rows, columns, height, width), across, finite
    in_parts(lambda at, count: loop(out.data_ptr(), x.data_ptr(), at, count, *given), tile_rows, x.numel() // tile_rows)


def scales_into(out: Tensor, amaxes: Tensor, under: Tensor | None, scales: Scales) -> None:
    """Writes the scales that follow from largest magnitudes; see `reference.scaling.scales_into`."""
    if amaxes.dtype == torch.float64:
        reference.scales_into(out, amaxes, under, scales)
        return
    how, amaxes = plan(scales.grid, wide=True), amaxes.contiguous()
    whole = 1.0 if under is None else float(under)
    numbers = (how.shift, how.low, how.least, how.half, how.parity, how.top)
    given = (whole, scales.rule, math.ldexp(1.0, scales.margin), scales.largest, scales.mantissa, scales.least, numbers, how.zero)
    scales_loop(out.data_ptr(), amaxes.data_ptr(), amaxes.numel(), *given)


def quantize_tiles_into(
    out: Tensor, scales: Tensor | None, x: Tensor, under: Tensor | None, tiles: Tiles, turn: Turn | None, how: Scales, elements: Elements
) -> None:
    """Rounds `x` under the scales of its tiles; see `reference.scaling.quantize_tiles_into`."""
    x = x if turn is None else turned(x, turn)
    amaxes = x.new_empty(tiles.counts(x.numel()), dtype=torch.promote_types(x.dtype, torch.float32))
    if scales is None:
        scales = torch.empty_like(amaxes, dtype=torch.float32)
    amaxes_into(amaxes, x, tiles, None, False)
    scales_into(scales, amaxes, under, how)
    quantize_scaled_into(out, x, scales, under, tiles, None, elements)


def quantize_scaled_into(
    out: Tensor, x: Tensor, scales: Tensor, under: Tensor | None, tiles: Tiles, turn: Turn | None, elements: Elements
) -> None:
    """Rounds `x` divided by its scales onto a grid; see `reference.scaling.quantize_scaled_into`."""
    if torch.float64 in (x.dtype, out.dtype):
        _quantize_scaled_wide(out, x, scales, under, tiles, turn, elements)
        return
    if not x.numel():
        return
    x = _stored(x if turn is None else turned(x, turn))
    whole = (scales if under is None else under_whole(scales, under)).contiguous()
    values = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _divide(values, x, whole, tiles)
    quantize_into(values, values, elements.seed, elements.grid, elements.rule, elements.stream, elements.offset)
    if not elements.restore:
        out.copy_(one_nan(values.to(out.dtype)))
        return
    factors = whole if elements.restore == Restore.ALL else scales.contiguous()
    _restore(out, values, factors, tiles, elements.rule.saturate)


def _divide(out: Tensor, x: Tensor, scales: Tensor, tiles: Tiles) -> None:
    (rows, columns, height, width, across), loop = tiles, divide_loop(x.dtype)
    addresses, given = (out.data_ptr(), x.data_ptr(), scales.data_ptr()), ((rows, columns, height, width), across)
    in_parts(lambda at, count: loop(*addresses, at, count, *given), x.numel() // columns, columns)


def _restore(out: Tensor, values: Tensor, scales: Tensor, tiles: Tiles, saturate: bool) -> None:
    rows, columns, height, width, across = tiles
    is_held = out.dtype in (torch.float32, torch.bfloat16) and out.is_contiguous()
    result = out if is_held else values
    most = SINGLE.pattern(torch.finfo(out.dtype).max) if saturate else SINGLE.nan
    loop, given = restore_loop(result.dtype), ((rows, columns, height, width), across, most)
    addresses = result.data_ptr(), values.data_ptr(), scales.data_ptr()
    in_parts(lambda at, count: loop(*addresses, at, count, *given), values.numel() // columns, columns)
    if not is_held:
        out.copy_(one_nan(values.to(out.dtype)))


def _stored(x: Tensor) -> Tensor:
    """Values as loops read them."""
    return (x if x.dtype in (torch.float32, torch.bfloat16) else x.to(torch.float32)).contiguous()
