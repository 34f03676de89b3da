"""Rounding under scales: from a format, a scale and a tensor to the operators, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qsim.formats import Format
from qsim.functional.arguments import Spelling
from qsim.scaling import Given, PerBlock, PerTile, Scaling
from qsim.scaling.tiling import PerSlice
from qsim_kernels.numbers.grid import Noise
from qsim_kernels.numbers.scales import Restore, TileSizes
from qsim_kernels.ops.direct import Operators


class Share(Protocol):
    """A process's shard of a distributed tensor."""

    def of_all(self, amaxes: Tensor) -> Tensor:
        """The largest magnitude of the whole tensor, from that of the share."""

    def of_channels(self, amaxes: Tensor) -> Tensor:
        """Those of the whole tensor's channels, from those of the share's."""


#: A tensor rounded under scales: the values, or the elements without their scales; the scales, float32 by matrix, tile down and tile
#: along, of blocks and tiles only if the elements were not multiplied by them again; and the scale of the whole tensor, 0-d float32, if
#: the scales are under one.
Scaled = tuple[Tensor, Tensor | None, Tensor | None]


class ScaleLayout(NamedTuple):
    """The layout and parameters of scales for a tensor of a shape, in the form that the operators take.

    Attributes:
        is_local: Whether the scales are those of blocks or tiles, which a kernel makes while it rounds.
        tiles: Which elements share a scale.
        numbers: The same as numbers.
        making: How scales are made.
        turn: The numbers of a transform that goes before: see `qsim.transforms`.
        whole: The tiles of the scale that they are under, as numbers, if there is one.
        largest: How that is made.
    """

    is_local: bool
    tiles: TileSizes
    numbers: Sequence[int]
    making: tuple[str, str]
    turn: Sequence[int] = ()
    whole: Sequence[int] | None = None
    largest: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, scaling: Scaling, element: Format, shape: Sequence[int], tiles: TileSizes, turn: Sequence[int] = ()) -> ScaleLayout:
        """The layout of a tensor of a shape, whose elements are rounded to a format."""
        is_local, making = isinstance(scaling, (PerBlock, PerTile)), scaling.spelling(element)
        if scaling.outer is None:
            return cls(is_local, tiles, numbers_of(tiles), making, turn)
        whole = numbers_of(scaling.outer.tiles(shape))
        return cls(is_local, tiles, numbers_of(tiles), making, turn, whole, scaling.outer.spelling(element, scaling.format))


def scale_layout(scaling: Scaling, element: Format, shape: torch.Size) -> ScaleLayout:
    """The layout of a tensor that is scaled along its own dimensions.

    Raises:
        IndexError: If the tensor lacks the dimensions.
    """
    if torch.compiler.is_compiling() or not scaling.is_directed:
        return ScaleLayout.of(scaling, element, shape, scaling.tiles(shape))  # delayed scales check their history
    return _known_scale_layout(scaling, element, shape)


@lru_cache(maxsize=4096)
def _known_scale_layout(scaling: Scaling, element: Format, shape: torch.Size) -> ScaleLayout:
    return ScaleLayout.of(scaling, element, shape, scaling.tiles(shape))


def quantize_scaled(
    ops: Operators,
    x: Tensor,
    spelt: Spelling,
    scaling: Scaling,
    noise: Noise,
    dtype: torch.dtype,
    restore: Restore = Restore.ALL,
    layout: ScaleLayout | None = None,
    share: Share | None = None,
    known: Tensor | None = None,
) -> Scaled:
    """Round a tensor under scales that follow from itself.

    Args:
        ops: The operators.
        x: Values.
        spelt: The elements' format and their rounding.
        scaling: The scales.
        noise: The random bits.
        dtype: The dtype of the values.
        restore: The factors that the elements are multiplied by again.
        layout: The arrangement of scales in the tensor, if not that of the scaling.
        share: How the largest magnitude of the whole tensor is found, if this is a share of it.
        known: What an earlier rounding found: the scales; or of blocks and tiles, that of the whole tensor.
    """
    if layout is None:
        layout = scale_layout(scaling, spelt.format, x.shape)
    own, turn, (seed, stream, offset) = layout.numbers, layout.turn, noise
    rounding = (seed, spelt.grid, spelt.rule, stream, offset, dtype, int(restore))
    if layout.is_local and known is not None:
        under: Tensor | None = known
    else:
        under = None if layout.whole is None else whole_scale(ops, x, layout, share)
    if layout.is_local:
        values, scales = ops.quantize_tiles(x, under, own, turn, *layout.making, *rounding)
        return values, None if restore else scales, under
    if known is None:
        known = _scales(ops, x, scaling, under, layout, share)
    return ops.quantize_scaled(x, known, under, own, turn, *rounding), known, under


def whole_scale(ops: Operators, x: Tensor, layout: ScaleLayout, share: Share | None = None) -> Tensor:
    """The scale of the whole tensor that others are under."""
    if share is None:
        of_whole = ops.scales_of_tiles(x, None, layout.whole, layout.turn, True, *layout.largest)
    else:
        of_whole = ops.scales(share.of_all(ops.amaxes(x, layout.whole, layout.turn, True)), None, *layout.largest)
    found: Tensor = of_whole.view(()) if x.numel() else of_whole.new_ones(())  # an empty tensor has no scale
    return found


def whole_scale_of(ops: Operators, amaxes: Tensor, layout: ScaleLayout) -> Tensor:
    """The same from the largest magnitudes of the tensor's parts."""
    count = amaxes.numel()
    of_whole: Tensor = ops.scales_of_tiles(amaxes, None, [1, count, 1, count, 0], (), True, *layout.largest)
    return of_whole.view(())


def _scales(ops: Operators, x: Tensor, scaling: Scaling, under: Tensor | None, layout: ScaleLayout, share: Share | None) -> Tensor:
    """The scales of a whole tensor or of channels: what many elements share is known when all have been read, so they are read again."""
    if isinstance(scaling, Given):
        return x.new_full(layout.tiles.counts(x.numel()), scaling.value, dtype=torch.float32)
    if share is None and not scaling.is_recorded:
        return ops.scales_of_tiles(x, under, layout.numbers, layout.turn, False, *layout.making)  # type: ignore[no-any-return]
    amaxes = ops.amaxes(x, layout.numbers, layout.turn, False)
    if share is not None:
        amaxes = share.of_channels(amaxes) if isinstance(scaling, PerSlice) else share.of_all(amaxes)
    return ops.scales(scaling.used(amaxes), under, *layout.making)  # type: ignore[no-any-return]


def numbers_of(tiles: TileSizes) -> list[int]:
    """Tiles as operators take them: what torch.compile writes into a graph is neither a NamedTuple nor a truth value among sizes."""
    return [*tiles[:4], int(tiles.across)]
