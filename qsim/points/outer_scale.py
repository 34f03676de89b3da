"""Scales of groups above the scales of blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Point
from qsim.functional.scaled import numbers_of
from qsim.points.base import Gradient, PointModule, divided, quantizer_of, surrogate, wide
from qsim.points.groups import check_granularity, grouped, ungrouped, within
from qsim.random.noise import draw
from qsim.scaling import PerBlock, PerTile, Scaling
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.ops.direct import operators

_SMALLEST = 2.0**-126


class OuterScale(PointModule):
    """Blocks whose scales are under a float32 scale of their row or of a larger block, instead of one of the tensor.

    Values are divided by `a / (M * M')`, where `a` is the largest magnitude of their group, `M` the largest value of the elements' format
    and `M'` that of the blocks' scales; then they are rounded with the scales of blocks, and multiplied again. The gradient is straight
    through.

    Args:
        point: A block format, or a `Quantizer` with scales, which may round in any way. A scale of the tensor that its scales are under, as
            in `"nvfp4"`, is replaced.
        granularity: The groups: `PerBlock(128)`, `PerRow()`, or another of `qsim.scaling`.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([[1e-6] * 16, [1000.0] * 16])
        >>> qsim.quantize(x, "nvfp4")[0, :2], qsim.points.OuterScale("nvfp4", qsim.scaling.PerRow())(x)[0, :2]
        (tensor([0., 0.]), tensor([1.0000e-06, 1.0000e-06]))
    """

    gradient: Gradient = "straight"

    def __init__(self, point: Point, granularity: Scaling | str) -> None:
        super().__init__()
        self.quantizer = quantizer_of("OuterScale", point, scales=True)
        self.granularity = check_granularity("OuterScale", granularity)
        scale = self.quantizer.scale
        if scale is not None and scale.outer is not None:
            # The scales of groups replace one of the tensor, under which no group would be independent of the others.
            scale = replace(scale, outer=None)
            self.quantizer = replace(self.quantizer, scale=scale)
        if scale is None or not scale.format.max < 2.0**100:
            raise ValueError(
                f"OuterScale: point needs scales in a format of limited range, as e4m3 blocks have, got {self.quantizer.format!r}, {scale}"
            )
        self.scale = scale
        self.reach = self.quantizer.format.max * scale.format.max
        self.is_directed = getattr(scale, "dim", -1) == -1 and getattr(self.granularity, "dim", -1) == -1

    @property
    def is_nested(self) -> bool:
        """Whether an operator rounds under both scales, in the basis of a transform, too."""
        return isinstance(self.scale, (PerBlock, PerTile))

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Divide by the scales of groups, round, and multiply."""
        if self.is_nested:
            return self.rounded_in(None, None, x, **noise)
        groups = grouped(wide(x.detach()), self.granularity)
        scale = divided(groups.abs().amax(within(groups), keepdim=True), self.reach)
        scale = torch.where(scale == 0, 1.0, scale).clamp(min=_SMALLEST)
        values = self.quantizer(ungrouped(groups / scale, tuple(x.shape)), **noise)
        return surrogate(x, ungrouped(grouped(values, self.granularity) * scale, tuple(x.shape)).to(x.dtype))

    def rounded_in(self, transform: Hadamard | None, flips: Tensor | None, x: Tensor, **noise: Any) -> Tensor:
        """Round in the basis of a transform, if there is one, whose signs `flips` changes; and return to the tensor's own."""
        spelt, shape, scale = self.quantizer.spelt, x.shape or (1,), self.scale
        seed, stream, offset = draw(spelt.is_stochastic, noise.get("seed"), noise.get("generator"), x.device)
        groups, tiles = numbers_of(self.granularity.tiles(shape)), numbers_of(scale.tiles(shape))
        given = tiles, () if transform is None else transform.turn(shape), *scale.spelling(spelt.format), groups, self.reach
        rounding = (seed, spelt.grid, spelt.rule, stream, offset, x.dtype, int(Restore.ALL))
        return surrogate(x, operators(x).quantize_nested(x.detach(), flips, *given, *rounding))

    def extra_repr(self) -> str:
        """The quantizer and the groups."""
        return f"{self.quantizer!r}, {self.granularity}"
