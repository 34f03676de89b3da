"""Rounding under scales: from a format, a scale and a tensor to the operators, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qsim.checks import Spelling
from qsim.scaling import Blocks, Channel, Given, Scaling, Tiles
from qsim_kernels import scales as numbers
from qsim_kernels.scales import Restore


class Share(Protocol):
    """What a process holds of a tensor that several hold together."""

    def of_all(self, amaxes: Tensor) -> Tensor:
        """The largest magnitude of the whole tensor, from that of the share."""

    def of_channels(self, amaxes: Tensor) -> Tensor:
        """Those of the whole tensor's channels, from those of the share's."""


class Scaled(NamedTuple):
    """A tensor rounded under scales.

    Attributes:
        values: The values, or the elements without their scales.
        scales: float32, by matrix, tile down and tile along; of blocks and tiles only if the elements were not multiplied with them again.
        under: The scale of the whole tensor, 0-d float32, if the scales are under one.
    """

    values: Tensor
    scales: Tensor | None
    under: Tensor | None


def quantize_scaled(
    x: Tensor,
    spelt: Spelling,
    scaling: Scaling,
    seed: Tensor | None,
    stream: int,
    offset: int,
    dtype: torch.dtype,
    restore: Restore = Restore.ALL,
    turn: Sequence[int] = (),
    tiles: numbers.Tiles | None = None,
    share: Share | None = None,
    known: Tensor | None = None,
) -> Scaled:
    """Rounds a tensor under scales that follow from itself.

    Args:
        x: Values.
        spelt: The elements' format and their rounding.
        scaling: The scales.
        seed: See `qsim.quantize`.
        stream: See `qsim.quantize`.
        offset: See `qsim.quantize`.
        dtype: The dtype of the values.
        restore: What the elements are multiplied with again.
        turn: The numbers of a transform that goes before: see `qsim.transforms`.
        tiles: Which elements share a scale, if not those that the scaling says.
        share: How the largest magnitude of the whole tensor is found, if this is a share of it.
        known: The scales, if they were made before.
    """
    ops = torch.ops.qsim
    where = scaling.tiles(x.shape) if tiles is None else tiles
    own, making = _numbers(where), scaling.spelling(spelt.format)
    rounding = (seed, spelt.grid, spelt.rule, stream, offset, dtype, int(restore))
    under = None
    if scaling.outer is not None:
        amax = ops.amaxes.default(x, _numbers(scaling.outer.tiles(x.shape)), turn, True)
        amax = amax if share is None else share.of_all(amax)
        largest = scaling.outer.spelling(spelt.format, scaling.format)
        of_whole = ops.scales.default(amax, None, *largest)
        under = of_whole.view(()) if x.numel() else of_whole.new_ones(())  # of nothing there is none
    if isinstance(scaling, (Blocks, Tiles)):
        values, scales = ops.quantize_tiles.default(x, under, own, turn, *making, *rounding)
        return Scaled(values, None if restore else scales, under)
    if known is None:
        known = _scales(x, scaling, under, where, turn, making, share)
    return Scaled(ops.quantize_scaled.default(x, known, under, own, turn, *rounding), known, under)


def _scales(
    x: Tensor,
    scaling: Scaling,
    under: Tensor | None,
    tiles: numbers.Tiles,
    turn: Sequence[int],
    making: tuple[str, str],
    share: Share | None,
) -> Tensor:
    """The scales of a whole tensor or of channels: what many elements share is known when all have been read, so they are read again."""
    if isinstance(scaling, Given):
        return x.new_full(tiles.counts(x.numel()), scaling.value, dtype=torch.float32)
    amaxes = torch.ops.qsim.amaxes.default(x, _numbers(tiles), turn, False)
    if share is not None:
        amaxes = share.of_channels(amaxes) if isinstance(scaling, Channel) else share.of_all(amaxes)
    return torch.ops.qsim.scales.default(scaling.used(amaxes), under, *making)  # type: ignore[no-any-return]


def _numbers(tiles: numbers.Tiles) -> list[int]:
    """Tiles as operators take them: what torch.compile writes into a graph is neither a NamedTuple nor a truth value among sizes."""
    return [*tiles[:4], int(tiles.across)]
