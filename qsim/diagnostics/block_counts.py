"""Outcomes of rounding block by block: of the elements that share a scale, or of rows where there are no scales of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qsim.diagnostics.elements import RoundedElements
from qsim.formats import Format
from qsim.text.records import Records, Values, plain
from qsim_kernels.numbers.scales import TileSizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What is known of each block.
BlockValue = Literal["amax", "scale", "saturated", "underflowed", "error"]
#: A channel is an outlier if its largest magnitude is that many times the median of all channels.
OUTLIER = 8.0


class BlockTally(NamedTuple):
    """The statistics of the blocks of a tensor, on its device.

    Attributes:
        blocks: The numbers of each block, of shape [values, matrices, rows of blocks, blocks in a row].
        channels: The largest magnitude of each channel.
    """

    blocks: Tensor
    channels: Tensor


@dataclass(frozen=True, eq=False)
class BlockCounts:
    """The outcomes of rounding for each block of the elements at one point of a layer.

    A block is what shares a scale: a block, a tile, a row or a whole matrix, as the point's scale says. Without scales, it is a row. Each
    value is a tensor of shape [matrices, rows of blocks, blocks in a row]; the matrices of a stack are experts, or the images of a batch.

    Attributes:
        layer: The layer's name in the model.
        point: The point.
        quantizer: A short description of the quantizer.
        step: The sampled step.
        amax: The largest magnitude, in the units of the tensor.
        scale: The scale; 1 without scales.
        saturated: The share of elements beyond the format's range.
        underflowed: The share of elements that are not zero before and zero after.
        error: The squared rounding errors relative to the squared elements.
        channels: The largest magnitude of each channel, before a transform: of the last dimension, or of the second one of images.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(64, 2)), qsim.FivePoint(act="mxfp4"))
        >>> x = torch.ones(3, 64)
        >>> x[1, 40] = 100.0
        >>> with qsim.diagnostics.Monitor(model, blocks=1) as monitor:
        ...     y = model(x)
        ...     monitor.step()
        >>> found = monitor.blocks["0", "act", 0]
        >>> found.amax[0], found.worst("underflowed"), found.outliers()
        (tensor([[  1.,   1.],
                [  1., 100.],
                [  1.,   1.]]), (0, 1, 1), {40: 100.0})
    """

    layer: str
    point: str
    quantizer: str
    step: int
    amax: Tensor
    scale: Tensor
    saturated: Tensor
    underflowed: Tensor
    error: Tensor
    channels: Tensor

    @classmethod
    def of(cls, layer: str, point: str, quantizer: str, step: int, blocks: Tensor, channels: Tensor) -> BlockCounts:
        """The counts of a `BlockTally`."""
        amax, scale, saturated, underflowed, error = blocks
        return cls(layer, point, quantizer, step, amax, scale, saturated, underflowed, error, channels)

    def worst(self, by: BlockValue = "error") -> tuple[int, int, int]:
        """The place of the block with the largest value.

        Args:
            by: The value.
        """
        values = self.values(by)
        place = int(values.nan_to_num(-math.inf).argmax())
        matrix, rest = divmod(place, values[0].numel())
        return matrix, *divmod(rest, values.shape[-1])

    def values(self, name: BlockValue) -> Tensor:
        """A value of all blocks.

        Raises:
            ValueError: If blocks have no such value.
        """
        if name not in get_args(BlockValue):
            raise ValueError(f"blocks have {', '.join(map(repr, get_args(BlockValue)))}, not {name!r}")
        found: Tensor = getattr(self, name)
        return found

    def outliers(self, times: float = OUTLIER) -> dict[int, float]:
        """The channels whose largest magnitude is many times the median of all channels, and these magnitudes, the largest first.

        Args:
            times: How many times.
        """
        limit = times * float(self.channels.median()) if self.channels.numel() else math.inf
        order = self.channels.argsort(descending=True).tolist()
        return {channel: float(self.channels[channel]) for channel in order if self.channels[channel] > limit}

    def heat_map(self, value: BlockValue = "error", *, matrix: int | None = None, ax: Axes | None = None) -> Axes:
        """Draw a value of all blocks as a map: rows of blocks downwards, and matrices below each other.

        Args:
            value: The value.
            matrix: Only this matrix, such as an expert.
            ax: The axes to draw on; new ones by default.
        """
        from qsim.diagnostics.block_figures import heat_map

        return heat_map(self, value, matrix, ax)

    def summary(self) -> dict[str, Any]:
        """The scalars to store: the range of scales, the mean and the worst of each share and of the error, and the number of outliers."""
        found: dict[str, Any] = {"layer": self.layer, "point": self.point, "step": self.step, "blocks": self.amax.numel()}
        name: BlockValue
        for name in ("amax", "scale"):
            values = self.values(name).flatten()
            found |= {f"{name}_min": float(values.min()), f"{name}_median": float(values.median()), f"{name}_max": float(values.max())}
        for name in ("saturated", "underflowed", "error"):
            values = self.values(name)
            found |= {name: float(values.nanmean()), f"worst_{name}": float(values.nan_to_num(0.0).max())}
        return plain(found | {"outliers": len(self.outliers())})  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain values, for JSON."""
        lists = {name: self.values(name).tolist() for name in get_args(BlockValue)}
        return plain({"layer": self.layer, "point": self.point, "step": self.step} | lists)  # type: ignore[no-any-return]


def _mean_of(name: BlockValue) -> Callable[[BlockCounts], float]:
    """A function that returns the mean of a value over blocks."""
    return lambda counts: float(counts.values(name).nanmean())


def _worst_of(name: BlockValue) -> Callable[[BlockCounts], float]:
    """A function that returns the largest value of any block."""
    return lambda counts: float(counts.values(name).nan_to_num(0.0).max())


@dataclass(frozen=True)
class BlockSamples(Records[BlockCounts]):
    """The statistics of blocks, by layer, point and step; prints as a table.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(64, 2)), qsim.FivePoint(act="mxfp4"))
        >>> with qsim.diagnostics.Monitor(model, every=1, blocks=1) as monitor:
        ...     for step in range(2):
        ...         y = model(torch.full((1, 64), 4.0**step))
        ...         monitor.step()
        >>> print(monitor.blocks)
        layer  point  step  quantizer  blocks  scales         saturated  underflowed  error  worst  outliers
        0      act    0     mxfp4           2  0.25 … 0.25          0 %          0 %    0 %    0 %         0
        0      act    1     mxfp4           2  1 … 1                0 %          0 %    0 %    0 %         0
    """

    COLUMNS: ClassVar[Values] = {
        **{name: name for name in ("layer", "point", "step", "quantizer")},
        "blocks": lambda counts: counts.amax.numel(),
        "scales": lambda counts: f"{float(counts.scale.min()):.3g} … {float(counts.scale.max()):.3g}",
        **{name: _mean_of(name) for name in ("saturated", "underflowed", "error")},
        "worst": _worst_of("error"),
        "outliers": lambda counts: len(counts.outliers()),
    }
    RIGHT: ClassVar[tuple[str, ...]] = ("blocks", "saturated", "underflowed", "error", "worst", "outliers")
    KEY: ClassVar[tuple[str, ...]] = ("layer", "point", "step")
    NAME: ClassVar[str] = "blocks"
    LOSSES: ClassVar[Values] = {name: _worst_of(name) for name in get_args(BlockValue)}

    def plot(self, value: BlockValue = "scale", ax: Axes | None = None) -> Axes:
        """Draw the history of a value at each point: its median over blocks, and the range from the smallest to the largest.

        Args:
            value: The value.
            ax: The axes to draw on; new ones by default.
        """
        from qsim.diagnostics.block_figures import histories

        return histories(self, value, ax)


def block_tally(x: Tensor, elements: RoundedElements, tiles: TileSizes, fmt: Format, channel: int) -> BlockTally:
    """The statistics of each block of a tensor.

    Args:
        x: The tensor.
        elements: Its elements before and after rounding, in its shape.
        tiles: Which of them form a block.
        fmt: Their format.
        channel: The dimension of channels.
    """
    before, after = elements.before, elements.after.to(elements.before.dtype)
    scales = torch.ones_like(before) if elements.scales is None else elements.scales.to(before.dtype)
    beyond, lost = (before > fmt.max) | (before < fmt.min), (before != 0) & (after == 0)
    own, error = before * scales, (after - before) * scales
    sums = _tiled(torch.stack([beyond.to(own.dtype), lost.to(own.dtype), own.square(), error.square(), torch.ones_like(own)]), tiles)
    largest, sums = _tiled(torch.stack([own.abs(), scales]), tiles).amax((3, 5)), sums.sum((3, 5))
    if tiles.across:
        sums, largest = sums.sum(1, keepdim=True), largest.amax(1, keepdim=True)
    saturated, underflowed, signal, noise, count = sums
    shares = saturated / count, underflowed / count, torch.where(signal > 0, noise / signal, 0.0)
    blocks = torch.stack([*largest, *shares]).float().reshape(-1, *_grid(x.shape, tiles, largest.shape[1:]))
    return BlockTally(blocks, x.abs().movedim(channel, 0).flatten(1).amax(1).float())


def _grid(shape: Sequence[int], tiles: TileSizes, counts: Sequence[int]) -> tuple[int, int, int]:
    """The blocks of a tensor as matrices: those along one dimension are in its place among the others."""
    found = list(counts)
    if tiles.rows == 1 and tiles.columns == shape[-1]:
        found = [*shape[:-1], counts[2]]
    elif tiles.width == 1:
        outer = next(dim for dim in range(len(shape)) if math.prod(shape[dim:]) == tiles.rows * tiles.columns)
        found = [*shape[:outer], counts[1], *shape[outer + 1 :]]
    found = [1, 1, *found]
    return math.prod(found[:-2]), found[-2], found[-1]


def _tiled(x: Tensor, tiles: TileSizes) -> Tensor:
    """Tensors in a stack, cut into tiles: [values, matrices, tiles down, height, tiles along, width], with zeros at the edges."""
    matrices = x.reshape(len(x), -1, tiles.rows, tiles.columns)
    padded = torch.nn.functional.pad(matrices, (0, -tiles.columns % tiles.width, 0, -tiles.rows % tiles.height))
    parts: Tensor = padded.unflatten(-1, (-1, tiles.width)).unflatten(-3, (-1, tiles.height))
    return parts
