"""Points that fit a layer, and a warning of weights that a format rounds to zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from qsim.formats import name_of
from qsim.functional.quantizer import Quantizer
from qsim.nn.converting.layers import Layer
from qsim.random.shards import local
from qsim.recipes.five_point import POINTS, FivePoint
from qsim.text.warning import warn

#: Number of a weight's elements that are looked at.
_SAMPLE = 1 << 16


def fitted(layer: Layer, points: FivePoint) -> tuple[FivePoint, str]:
    """The points of a layer, and how they differ from those given.

    Transforms are left out if channels fall into groups, as in depthwise convolutions: no transform may cross their borders.
    """
    transform = next((point.transform for point in _quantizers(points).values() if point.transform is not None), None)
    if getattr(layer.module, "groups", 1) == 1 or transform is None:
        return points, ""
    plain = {name: replace(point, transform=None) for name, point in _quantizers(points).items()}
    return replace(points, **plain), f"without {transform!r}, because its channels fall into groups"  # type: ignore[arg-type]


def _quantizers(points: FivePoint) -> dict[str, Quantizer]:
    return {name: point for name in POINTS if isinstance(point := getattr(points, name), Quantizer)}


def warn_of_zeros(chosen: Sequence[tuple[Layer, FivePoint]]) -> None:
    """Warn of weights of which a format without scales leaves less than half."""
    lost = [(layer, points) for layer, points in chosen if points.weight is not None and _share_of_zeros(layer.module, points.weight) > 0.5]
    if lost:
        names, point = [layer.title for layer, _ in lost], lost[0][1].weight
        assert point is not None
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        name = repr(name_of(point.format) or point.format)
        warn(
            f"convert: {name} without a scale rounds more than half of the weights of {shown} to zero, because its smallest number is "
            f"{point.format.smallest:g}: give the point a scale, as in Quantizer({name}, scale=qsim.scaling.PerTensor())"
        )


def _share_of_zeros(module: nn.Module, point: Quantizer) -> float:
    """The share of a weight's numbers that a point without scales rounds to zero."""
    weight = getattr(module, "weight", None)
    if point.scale is not None or point.spelt.is_stochastic or not isinstance(weight, torch.Tensor) or weight.is_meta or not weight.numel():
        return 0.0
    seen = local(weight.detach()).flatten()[:_SAMPLE]
    return float(((seen != 0) & (seen.abs() < point.format.smallest / 2)).float().mean()) if seen.numel() else 0.0
