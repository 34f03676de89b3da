"""OsciReset: weights whose rounded values oscillate are set to these values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsim.control.base import Control, Layer, weight_of
from qsim.formats.base import check_integer
from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Quantizer
from qsim.nn.product.bilinear import LINEAR
from qsim.nn.product.plans import plan_for
from qsim.points.base import check_number
from qsim.recipes.five_point import FivePoint
from qsim.scaling import Delayed


@dataclass
class WeightPaths:
    """Distances that a weight and its rounded values have moved, by element.

    Attributes:
        weight: The weight after the last step.
        rounded: What it is rounded to.
        moved: The sum of the distances that the weight moved in each step.
        jumped: The sum of those of the rounded weight.
    """

    weight: Tensor
    rounded: Tensor
    moved: Tensor
    jumped: Tensor

    def follow(self, weight: Tensor, rounded: Tensor) -> None:
        """Add a step."""
        self.moved += (weight - self.weight).abs()
        self.jumped += (rounded - self.rounded).abs()
        self.weight, self.rounded = weight.clone(), rounded


class OsciReset(Control):
    """Reset weights that oscillate: Chen et al., TetraJet-v2, arXiv 2510.27527, and the authors' code.

    A weight near the middle between two values of its format crosses it in many steps, and what the layer multiplies jumps from one value
    to the other although the weight hardly moves. In a window of steps, an element's ratio is the sum of the distances that its rounded
    value moved over the sum of those that it moved itself. Elements whose ratio reaches a threshold are set to their rounded values, the
    centre of the interval that is rounded there. Elements that have not moved are left alone.

    The first window begins before the first step after `first`, and a window begins every `period` steps. During a window, four tensors of
    a weight's size are kept for each layer. Controlled are linear layers whose weights are rounded, not stochastically.

    Args:
        period: Steps from the beginning of a window to that of the next.
        window: Steps in a window: 50 in the paper.
        ratio: The threshold: 8 in the paper, 16 by default in the code.
        first: Steps before the first window.

    Attributes:
        counts: How many elements of each layer were reset at the end of the last window.

    Example:
        >>> import torch, qsim
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(layer.weight, 0.51)
        >>> model = qsim.convert(torch.nn.Sequential(layer), qsim.FivePoint(weight="int4"))
        >>> control = qsim.control.OsciReset(period=4, window=4).start(model)
        >>> for value in (0.49, 0.51, 0.49, 0.51):  # rounded to 0, 1, 0, 1
        ...     _ = torch.nn.init.constant_(layer.weight, value)
        ...     control.step()
        >>> model[0].weight.item(), control.counts
        (1.0, {'0': 1})
    """

    needs = "linear layer with rounded weights"

    def __init__(self, *, period: int = 200, window: int = 50, ratio: float = 8.0, first: int = 0) -> None:
        super().__init__()
        self.period = check_integer("OsciReset", "period", period, 1, 2**31)
        self.window = check_integer("OsciReset", "window", window, 1, self.period)
        self.ratio = check_number("OsciReset", "ratio", ratio, 1.0, float("inf"))
        self.first = check_integer("OsciReset", "first", first, 0, 2**62)
        self.counts: dict[str, int] = {}
        self._paths: dict[str, WeightPaths] = {}

    def controls(self, layer: Layer) -> bool:  # noqa: D102 (documented above)
        return super().controls(layer) and layer.points.weight is not None

    def begin(self, layers: dict[str, Layer]) -> None:  # noqa: D102 (documented above)
        for name, layer in layers.items():
            _check_point(name, layer.points.weight)
        if self.first == self.steps:
            self._begin_window(layers)

    @torch.no_grad()
    def advance(self, layers: dict[str, Layer]) -> None:  # noqa: D102 (documented above)
        done = self.steps - self.first
        if self._paths:
            for name, layer in layers.items():
                self._paths[name].follow(weight_of(layer).detach(), rounded_weight(layer))
            if (done - 1) % self.period + 1 == self.window:
                self._reset(layers)
        if done >= 0 and done % self.period == 0:
            self._begin_window(layers)

    def resume(self, layers: dict[str, Layer], state: Mapping[str, Any]) -> None:  # noqa: D102 (documented above)
        for name, kept in state["layers"].items():
            device = weight_of(layers[name]).device
            self._paths[name] = WeightPaths(**{which: x.to(device) for which, x in kept.items()})

    def kept(self) -> dict[str, Any]:  # noqa: D102 (documented above)
        return {name: dict(vars(paths)) for name, paths in self._paths.items()}

    def _begin_window(self, layers: dict[str, Layer]) -> None:
        for name, layer in layers.items():
            weight, rounded = weight_of(layer).detach().clone(), rounded_weight(layer)
            self._paths[name] = WeightPaths(weight, rounded, torch.zeros_like(rounded), torch.zeros_like(rounded))

    def _reset(self, layers: dict[str, Layer]) -> None:
        """Set the elements that oscillated to their rounded values."""
        paths, self._paths = self._paths, {}
        for name, layer in layers.items():
            oscillates = (paths[name].moved > 0) & (paths[name].jumped >= self.ratio * paths[name].moved)
            weight_of(layer).copy_(torch.where(oscillates, paths[name].rounded, weight_of(layer)))
            self.counts[name] = int(oscillates.sum())


@torch.no_grad()
def rounded_weight(layer: Layer) -> Tensor:
    """Return the rounded weight that a linear layer multiplies, in at least float32."""
    weight, point = weight_of(layer).detach(), layer.points.weight
    if isinstance(point, CallablePoint):
        return point.rounded("weight", weight).to(torch.promote_types(weight.dtype, torch.float32))
    plan = plan_for(FivePoint(weight=point), LINEAR, weight, weight)
    assert plan is not None  # the weight is rounded
    return plan.second.forward.restored(plan.ops, weight, None)


def _check_point(name: str, point: Quantizer | CallablePoint | None) -> None:
    """Raise an error for weights that have no single rounded value."""
    if isinstance(point, Quantizer) and point.rounding.is_stochastic:
        raise ValueError(f"OsciReset: {name}: its weight is rounded stochastically, so that every value jumps: give round-to-nearest")
    if isinstance(point, Quantizer) and isinstance(point.scale, Delayed):
        raise ValueError(f"OsciReset: {name}: its weight has a delayed scale, and measuring it would add to the history")
