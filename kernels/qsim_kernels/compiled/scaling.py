"""Rounding under scales on CPUs, in loops compiled by Numba; bit for bit the same as `qsim_kernels.reference.scaling`."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.carrier import SINGLE, plan
from qsim_kernels.compiled import quantize_into
from qsim_kernels.compiled.hadamard import hadamard
from qsim_kernels.compiled.threads import in_parts
from qsim_kernels.compiled.tiles import amaxes_loop, divide_loop, restore_loop, scales_loop
from qsim_kernels.reference import scaling as reference
from qsim_kernels.reference.rounding import one_nan
from qsim_kernels.reference.scaling import rescaled_into, under_whole
from qsim_kernels.scales import ElementRounding, Restore, Scales, Tiles, Turn

__all__ = ["amaxes_into", "quantize_scaled_into", "quantize_tiles_into", "rescaled_into", "scales_into", "scales_of_tiles_into", "hadamard"]

#: Elements that a thread divides, rounds and multiplies before it continues with the next.
_AT_ONCE = 1 << 15
_quantize_scaled_wide = partial(reference.quantize_scaled_into, quantize=quantize_into)


def amaxes_into(out: Tensor, x: Tensor, tiles: Tiles, turn: Turn | None, finite: bool) -> None:
    """Write the largest magnitude of each tile; see `reference.scaling.amaxes_into`."""
    if not out.numel():
        return
    if x.dtype == torch.float64 or not x.numel():
        reference.amaxes_into(out, x, tiles, turn, finite)
        return
    x = _stored(x if turn is None else hadamard(x, turn))
    (rows, columns, height, width, across), loop = _in_rows(tiles), amaxes_loop(x.dtype)
    matrices, tile_rows = x.numel() // (rows * columns), out.numel() // -(-columns // width)
    given = matrices, (rows, columns, height, width), across, finite
    in_parts(lambda at, count: loop(out.data_ptr(), x.data_ptr(), at, count, *given), tile_rows, x.numel() // tile_rows)


def scales_into(out: Tensor, amaxes: Tensor, under: Tensor | None, scales: Scales) -> None:
    """Write the scales that result from the largest magnitudes; see `reference.scaling.scales_into`."""
    if amaxes.dtype == torch.float64:
        reference.scales_into(out, amaxes, under, scales)
        return
    how, amaxes = plan(scales.grid, wide=True), amaxes.contiguous()
    whole = 1.0 if under is None else float(under)
    numbers = (how.shift, how.low, how.least, how.half, how.parity, how.top)
    given = (whole, scales.rule, math.ldexp(1.0, scales.margin), scales.largest, scales.mantissa, scales.least, numbers, how.zero)
    scales_loop(out.data_ptr(), amaxes.data_ptr(), amaxes.numel(), *given)


scales_of_tiles_into = partial(reference.scales_of_tiles_into, largest=amaxes_into, make=scales_into)


def quantize_tiles_into(
    out: Tensor,
    scales: Tensor | None,
    x: Tensor,
    under: Tensor | None,
    tiles: Tiles,
    turn: Turn | None,
    how: Scales,
    elements: ElementRounding,
    seed: Tensor | None,
    stream: int,
    offset: int,
) -> None:
    """Round `x` under the scales of its tiles; see `reference.scaling.quantize_tiles_into`."""
    x = x if turn is None else hadamard(x, turn)
    if scales is None:
        scales = x.new_empty(tiles.counts(x.numel()), dtype=torch.float32)
    scales_of_tiles_into(scales, x, under, tiles, None, False, how)
    quantize_scaled_into(out, x, scales, under, tiles, None, elements, seed, stream, offset)


def quantize_scaled_into(
    out: Tensor,
    x: Tensor,
    scales: Tensor,
    under: Tensor | None,
    tiles: Tiles,
    turn: Turn | None,
    elements: ElementRounding,
    seed: Tensor | None,
    stream: int,
    offset: int,
) -> None:
    """Round `x` divided by its scales onto a grid; see `reference.scaling.quantize_scaled_into`."""
    if torch.float64 in (x.dtype, out.dtype):
        _quantize_scaled_wide(out, x, scales, under, tiles, turn, elements, seed, stream, offset)
        return
    if not x.numel():
        return
    x = _stored(x if turn is None else hadamard(x, turn))
    whole = (scales if under is None else under_whole(scales, under)).contiguous()
    factors = whole if elements.restore == Restore.ALL else scales.contiguous()
    is_held = out.dtype in (torch.float32, torch.bfloat16) and out.is_contiguous()
    result = out if is_held else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    part = _Part(result.view(-1), x.view(-1), whole, factors, _in_rows(tiles), elements, seed, stream, offset, out.dtype)
    in_parts(part.round, x.numel() // part.tiles.columns, part.tiles.columns)
    if not is_held:
        out.copy_(one_nan(result.to(out.dtype)))


class _Part(NamedTuple):
    """The tensors whose rows threads round.

    Attributes:
        out: The output.
        x: Values.
        scales: What the values are divided by.
        factors: What they are multiplied by again.
        tiles: Which elements share a scale.
        elements: How elements are rounded.
        seed: See `reference.quantize_into`.
        stream: See `reference.quantize_into`.
        offset: See `reference.quantize_into`.
        dtype: The dtype in which the result must be finite.
    """

    out: Tensor
    x: Tensor
    scales: Tensor
    factors: Tensor
    tiles: Tiles
    elements: ElementRounding
    seed: Tensor | None
    stream: int
    offset: int
    dtype: torch.dtype

    def round(self, at: int, count: int) -> None:
        """Round a number of rows starting at one, few enough at once to stay in the CPU cache."""
        columns, how = self.tiles.columns, self.elements
        rows = min(count, max(1, _AT_ONCE // columns))
        values, rounded = (torch.empty(rows * columns, dtype=torch.float32, device=self.x.device) for _ in range(2))
        for first in range(at, at + count, rows):
            last = min(first + rows, at + count)
            here, size = slice(first * columns, last * columns), (last - first) * columns
            self._divide(values, first, last - first)
            quantize_into(rounded[:size], values[:size], self.seed, how.grid, how.rule, self.stream, self.offset + here.start)
            if how.restore:
                self._restore(rounded, first, last - first)
            else:
                self.out[here].copy_(one_nan(rounded[:size].to(self.out.dtype)))

    def _divide(self, values: Tensor, first: int, count: int) -> None:
        rows, columns, height, width, across = self.tiles
        # The loop counts from the very first row.
        to = values.data_ptr() - first * columns * values.element_size()
        divide_loop(self.x.dtype)(to, self.x.data_ptr(), self.scales.data_ptr(), first, count, (rows, columns, height, width), across)

    def _restore(self, rounded: Tensor, first: int, count: int) -> None:
        rows, columns, height, width, across = self.tiles
        most = SINGLE.pattern(torch.finfo(self.dtype).max) if self.elements.rule.saturate else SINGLE.nan
        came = rounded.data_ptr() - first * columns * rounded.element_size()
        loop, shape = restore_loop(self.out.dtype), (rows, columns, height, width)
        loop(self.out.data_ptr(), came, self.factors.data_ptr(), first, count, shape, across, most)


def _in_rows(tiles: Tiles) -> Tiles:
    """The tiles as one tile per row, if consecutive tiles allow it: threads can then share any number of them."""
    if tiles.rows == 1 and tiles.columns % tiles.width == 0 and not tiles.across:
        return Tiles(1, tiles.width, 1, tiles.width, False)
    return tiles


def _stored(x: Tensor) -> Tensor:
    """Values in the form that loops read."""
    return (x if x.dtype in (torch.float32, torch.bfloat16) else x.to(torch.float32)).contiguous()
