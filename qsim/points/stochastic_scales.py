"""Scales of blocks that are rounded stochastically."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim.functional import quantize
from qsim.functional.quantizer import Point, Quantizer
from qsim.points.base import Gradient, PointModule, divided, quantizer_of, surrogate
from qsim.points.groups import grouped, ungrouped, within
from qsim.random.noise import Noise
from qsim.random.streams import stream
from qsim.scaling import Delayed, Given

_SMALLEST = 2.0**-126
_SCALES = stream("scales")


class StochasticScales(PointModule):
    """Blocks whose scales are rounded stochastically to their format.

    Elements are divided by `a / M`, where `a` is the largest magnitude of their block and `M` the largest value of their format, and are
    rounded; then they are multiplied by a scale drawn from the two values next to `a / M` in the scales' format, whose mean it is. So no
    element saturates, and the mean over scales is what an exact scale gives: the tensor, if elements are rounded stochastically, too. With
    a scale of the tensor above them, `outer=PerTensor()` or `"nvfp4"`, blocks have the scales `a / M / outer`. Scales beyond the range of
    their format become its ends. The gradient is straight through.

    `MSEden` corrects scales before it rounds them; this rounds them as they are.

    Args:
        point: A block format, or a `Quantizer` with scales by the rule `"fit"`.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([0.3, -1.1, 2.3, 0.7] * 4)
        >>> point = qsim.points.StochasticScales(qsim.Quantizer("nvfp4", "stochastic"))
        >>> mean = point(x.expand(4000, 16), seed=0).mean(0)  # each row draws its own scale
        >>> bool((mean - x).abs().max() < 0.05)
        True
    """

    gradient: Gradient = "straight"
    is_stochastic = True

    def __init__(self, point: Point) -> None:
        super().__init__()
        self.point = quantizer_of("StochasticScales", point, scales=True)
        scale = self.point.scale
        if scale is None or isinstance(scale, (Given, Delayed)):
            raise ValueError(f"StochasticScales: point needs scales that follow from its tensor, got scale={scale!r}")
        if (scale.rule, scale.margin) != ("fit", 0):
            raise ValueError(f"StochasticScales: scales are drawn next to a / M, rule='fit' without a margin, got {scale!r}")
        self.scale, self.elements = scale, Quantizer(self.point.format, self.point.rounding, overflow=self.point.overflow)
        self.is_directed = getattr(scale, "dim", None) == -1

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round the elements under exact scales, and the scales."""
        groups = grouped(x.detach().double(), self.scale)
        amax = groups.abs().amax(within(groups), keepdim=True)
        # As under other scales, what is not finite makes NaN of all that share a scale.
        amax = torch.where(amax.isfinite(), amax, torch.nan)
        exact = divided(amax, self.elements.format.max).clamp(min=_SMALLEST)
        outer = self._outer(exact)
        drawn = quantize(exact / outer, self.scale.format, "stochastic", **_apart(noise)) * outer
        values = self.elements(groups / exact, **noise) * drawn
        return surrogate(x, ungrouped(values, tuple(x.shape)).to(x.dtype))

    def _outer(self, exact: Tensor) -> Tensor | float:
        """The scale of the tensor, under which the largest block's is the largest value of the scales' format."""
        if self.scale.outer is None:
            return 1.0
        return quantize(divided(exact.nan_to_num(0.0).amax(), self.scale.format.max).clamp(min=_SMALLEST), self.scale.outer.format)

    def extra_repr(self) -> str:
        """The quantizer."""
        return repr(self.point)


def _apart(noise: dict[str, Any]) -> dict[str, Any]:
    """The random bits of scales: if a seed is given, another of its streams than that of elements."""
    seed = noise.get("seed")
    if seed is None:
        return noise
    number, own, _ = seed if isinstance(seed, Noise) else (seed, 0, 0)
    return {**noise, "seed": Noise(number, own ^ _SCALES)}
