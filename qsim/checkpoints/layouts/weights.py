"""The weight of a layer as the numbers that its forward pass multiplies: codes of elements, and their scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from qsim.formats import FP32
from qsim.functional.callables import CallablePoint
from qsim.functional.codes import decode, encode
from qsim.functional.quantizer import Quantizer
from qsim.nn.converting.layers import is_conv1d
from qsim.nn.modules import FivePointModule, Linear
from qsim.rounding import NEAREST
from qsim.scaling import Delayed, Given, PerBlock, PerRow, Scaling
from qsim.scaling.tiling import PerSlice
from qsim_kernels.torch.scaling import under_whole


class LayoutError(ValueError):
    """The reason why a layout cannot express a layer."""


@dataclass(frozen=True)
class CodedWeight:
    """A matrix of codes with the scales of its forward pass: a value is the element times its scale, rounded to float32.

    A stack of matrices has one more dimension in front.

    Attributes:
        codes: The codes of the elements, uint8.
        scales: The scales in float32, one for each tile of the matrix, with that of the whole tensor multiplied in.
        scale_codes: The codes of the scales without that of the whole tensor, if they have a format of their own.
        outer: The scale of the whole tensor, 0-d float32, if there is one; for a stack of shape [matrices, 1, 1].
        tile: The height and the width of a tile.
    """

    codes: Tensor
    scales: Tensor
    scale_codes: Tensor | None
    outer: Tensor | None
    tile: tuple[int, ...]

    def part(self, rows: range) -> CodedWeight:
        """Some rows of the matrix; `check_part` says whether they have scales of their own."""
        height, width = self.tile
        if len(rows) == len(self.codes):
            return self
        own = slice(rows.start // height, -(-rows.stop // height))
        scale_codes = None if self.scale_codes is None else self.scale_codes[own]
        tile = (min(height, len(rows)), width)
        return replace(self, codes=self.codes[rows.start : rows.stop], scales=self.scales[own], scale_codes=scale_codes, tile=tile)

    def spread(self, scales: Tensor, size: int) -> Tensor:
        """Repeat scales, so that there is one for every row and every `size` neighbours in it."""
        rows, columns = self.codes.shape[-2:]
        height, width = self.tile
        return scales.repeat_interleave(height, -2)[..., :rows, :].repeat_interleave(width // size, -1)[..., : columns // size].contiguous()


def stacked(matrices: Sequence[CodedWeight]) -> CodedWeight:
    """Stack matrices that have scales of one kind."""
    codes, scales = (torch.stack([getattr(matrix, name) for matrix in matrices]) for name in ("codes", "scales"))
    of_scales = [matrix.scale_codes for matrix in matrices if matrix.scale_codes is not None]
    outer = [matrix.outer.view(1, 1) for matrix in matrices if matrix.outer is not None]
    return CodedWeight(
        codes, scales, torch.stack(of_scales) if of_scales else None, torch.stack(outer) if outer else None, matrices[0].tile
    )


def matrix(layer: FivePointModule) -> Tensor:
    """The weight of a layer with a row per output, as `torch.nn.Linear` has it: that of Hugging Face's `Conv1D` is transposed."""
    weight = layer.get_parameter("weight").detach()
    return weight.t() if is_conv1d(layer) else weight


def forward_weight(layer: FivePointModule) -> Quantizer:
    """The rounding of a linear layer's weight in the forward pass, with scales along the dimension that the product sums over.

    Stochastic rounding, which has no single result, is replaced by rounding to nearest.

    Raises:
        LayoutError: If no layout can express it.
    """
    point = layer.points.weight
    if not isinstance(layer, Linear) and not is_conv1d(layer):
        raise LayoutError(f"it is a {type(layer).__name__}, and layouts hold linear layers")
    if is_parametrized(layer):
        raise LayoutError("its weight is computed by a parametrization: call torch.nn.utils.parametrize.remove_parametrizations first")
    if isinstance(point, CallablePoint):
        raise LayoutError(f"its point weight is the callable {point.name}, whose results no layout can express")
    if point is None:
        raise LayoutError("its point weight is None: there are no low-precision numbers to write")
    if point.transform is not None:
        raise LayoutError(f"its weight is rounded after a transform, {point.transform!r}")
    if layer.get_parameter("weight").dtype == torch.float64:
        raise LayoutError("its weight is float64, and layouts decode in float32")
    rounding = NEAREST if point.rounding.is_stochastic else point.rounding
    return replace(point, rounding=rounding, scale=_scaling_of(layer, point))


def forward_act(layer: FivePointModule, *, weight_only: bool) -> Quantizer | None:
    """The rounding of a linear layer's input, if a checkpoint is to have it.

    Raises:
        LayoutError: If no layout can express it.
    """
    point = None if weight_only else layer.points.act
    if isinstance(point, CallablePoint):
        raise LayoutError(f"its point act is the callable {point.name}, which no layout can express; weight_only=True omits it")
    return point


def original_weight(layer: FivePointModule) -> Quantizer:
    """The rounding of a layer's weight, which `forward_weight` has accepted."""
    point = layer.points.weight
    assert isinstance(point, Quantizer)
    return point


def check_part(point: Quantizer, shape: Sequence[int], rows: range) -> None:
    """Raise an error for rows of a matrix that share a tile of scales with other rows, unless tiles have all rows."""
    assert point.scale is not None  # forward_weight sees to it
    height = point.scale.extent(shape)[0]
    if height < shape[0] and (rows.start % height or (rows.stop % height and rows.stop < shape[0])):
        raise LayoutError(f"its rows {rows.start} to {rows.stop} of the stack share tiles of {height} rows with other layers")


def _scaling_of(layer: FivePointModule, point: Quantizer) -> Scaling:
    """The scales that evaluation uses, in the directions of the product; a weight without scales has the scale 1."""
    if point.scale is None:
        return Given(1.0)
    if isinstance(point.scale, PerBlock):
        return replace(point.scale, dim=-1)
    if isinstance(point.scale, PerSlice):
        return PerRow(-1, point.scale.format, point.scale.rule, point.scale.margin, point.scale.outer)
    if isinstance(point.scale, Delayed):
        return Given(delayed_scale(layer, "weight", point))
    return point.scale


def delayed_scale(layer: FivePointModule, name: str, point: Quantizer) -> float:
    """The scale that evaluation uses at a point with a delayed scale.

    Raises:
        LayoutError: If nothing was recorded yet.
    """
    assert isinstance(point.scale, Delayed)
    largest = layer.get_buffer(f"{name}_amaxes").amax()
    if not largest > 0:
        raise LayoutError(f"the delayed scale of {name} has no history yet: run a training step first")
    return float(torch.ops.qsim.scales.default(largest.view(1, 1, 1), None, *point.scale.spelling(point.format)))


def coded_weight(layer: FivePointModule, point: Quantizer) -> CodedWeight:
    """A layer's weight in codes.

    Args:
        layer: The layer.
        point: The result of `forward_weight`.

    Raises:
        ValueError: If the weight is not finite.
    """
    scaling, weight = point.scale, matrix(layer)
    assert scaling is not None  # forward_weight sees to it
    if not bool(weight.isfinite().all()):
        raise ValueError("has a weight that is not finite")
    found = encode(weight, point.format, rounding=point.rounding, overflow=point.usual_overflow, scale=scaling)
    if scaling.format == FP32:
        factors, codes = found.scales, None
    else:
        factors, codes = decode(found.scales, scaling.format), found.scales
    folded = factors if found.outer is None else under_whole(factors, found.outer)
    return CodedWeight(found.codes, folded, codes, found.outer, scaling.extent(weight.shape))
