"""Following the blocks of a few places: chosen by name, or those that were worst in the sample before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qsim.diagnostics.async_copy import HostCopy
from qsim.diagnostics.block_counts import BlockTally, block_tally
from qsim.diagnostics.elements import RoundedElements
from qsim.formats import Format
from qsim.nn.product.sites import Site
from qsim_kernels.numbers.scales import TileSizes

#: A layer's number and a point.
NumberedPoint = tuple[int, str]


class BlockFollower:
    """Follow the blocks of some places during one sample.

    Args:
        places: The places to follow.
        room: How many places may follow that are none of these, in the order of their calls.
    """

    def __init__(self, places: Iterable[NumberedPoint], room: int) -> None:
        self._places, self._room = set(places), room
        self._tallies: dict[NumberedPoint, tuple[Format, BlockTally]] = {}

    def wants(self, layer: int, point: str) -> bool:
        """Whether the blocks at a point of a layer are followed, and its first call in the sample is not over."""
        place = layer, point
        if place not in self._places and self._room:
            self._room -= 1
            self._places.add(place)
        return place in self._places and place not in self._tallies

    def note(self, layer: int, site: Site, elements: RoundedElements, x: Tensor) -> None:
        """Count the blocks of a tensor."""
        if not x.numel() or not x.dim():
            return
        assert site.quantizer is not None  # points that round nothing are not reported
        fmt = site.quantizer.format
        shape = site.as_matrix(x).shape
        before, after, scales = (own if own is None else own.expand_as(elements.before).reshape(shape) for own in elements)
        assert before is not None
        assert after is not None  # only scales may be missing
        shaped = RoundedElements(before, after, scales)
        tally = block_tally(x.reshape(shape), shaped, tiles_of(site, shape), fmt, 1 if _is_image(site) else -1)
        if site.groups is not None and x.dim() == 2:
            tally = _by_group(tally, site.groups.ends)
        self._tallies[layer, site.name] = fmt, tally

    def copies(self) -> list[tuple[NumberedPoint, Format, HostCopy, HostCopy]]:
        """The counts, on their way to the host."""
        return [(place, fmt, HostCopy(tally.blocks), HostCopy(tally.channels)) for place, (fmt, tally) in self._tallies.items()]


def tiles_of(site: Site, shape: torch.Size) -> TileSizes:
    """Which elements of a tensor form a block: those that share a scale, or a row.

    The rows of a grouped product are those of its groups, whatever shares a scale within them.
    """
    scale = None if site.quantizer is None else site.quantizer.scale
    if scale is None or (site.groups is not None and len(shape) == 2):
        return TileSizes(1, shape[-1], 1, shape[-1], False)
    return scale.tiles(shape) if site.along is None else site.along.tiles(scale.repeated, shape)


def _is_image(site: Site) -> bool:
    """Whether channels are the second dimension, as those of images and of kernels are."""
    return site.along is not None and not site.along.is_matrix


def _by_group(tally: BlockTally, ends: Tensor) -> BlockTally:
    """The statistics of the rows of a tensor, put together for each group."""
    rows = tally.blocks.flatten(1)
    count = len(ends)
    groups = torch.searchsorted(ends, torch.arange(rows.shape[1], device=ends.device, dtype=ends.dtype), right=True).clamp(max=count)
    largest = rows[:2].new_zeros(2, count + 1).scatter_reduce(1, groups.expand(2, -1), rows[:2], "amax")
    sums = rows.new_zeros(4, count + 1).index_add(1, groups, torch.cat([rows[2:], torch.ones_like(rows[:1])]))
    shares = sums[:3] / sums[3].clamp(min=1)
    return tally._replace(blocks=torch.cat([largest, shares])[:, :count, None, None])


def checked_places(given: int | Sequence[tuple[str, str]], names: Sequence[str]) -> tuple[list[NumberedPoint], int]:
    """The places to follow by the numbers of their layers, and how many others.

    Args:
        given: The number of places to follow, or layers and points.
        names: The names of the layers.

    Raises:
        TypeError: If they are something else.
        ValueError: If there is no such layer, or the number is negative.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 0:
            raise ValueError(f"Monitor: blocks must be 0 or more places, got {given}")
        return [], given
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, tuple) and len(each) == 2 for each in given):
        raise TypeError(f"Monitor: blocks must be a number of places, or pairs of a layer and a point, got {given!r}")
    for layer, _ in given:
        if layer not in names:
            raise ValueError(f"Monitor: blocks: there is no layer {layer!r} with points; there are {', '.join(map(repr, names))}")
    return [(names.index(layer), point) for layer, point in given], 0
