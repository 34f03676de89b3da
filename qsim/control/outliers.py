"""OutControl: the channels of a layer's input with the largest norms get a wider format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qsim.control.base import Control, Layer, agreed, weight_of
from qsim.formats.base import check_integer
from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Point, Quantizer
from qsim.points.base import check_number, quantizer_of
from qsim.points.channels import Channels
from qsim.points.rotated import Rotated
from qsim.recipes.five_point import POINTS, REUSES, FivePoint


class OutControl(Control):
    """Round the channels with outliers in a wider format: Chen et al., TetraJet-v2, arXiv 2510.27527, and the authors' code.

    In a window of steps, each layer adds up the norms of the channels of its input, in training. At its end the share of channels with the
    largest sums, over all processes, moves to the wider format: in the input and the weight of the forward product, and in the input that
    the gradient of the weight multiplies. Points become `qsim.points.Channels`, which `qsim.save` keeps. The gradient of the output has one
    rounding for all channels; the authors round it in FP8, too, where it multiplies wider channels.

    Controlled are linear layers whose inputs and weights are both rounded. Compiled layers are compiled again when their points change.

    Args:
        share: The share of wider channels, rounded to a whole number of channels: 0.1 in the paper.
        wider: The wider format, or a `Quantizer`.
        window: Steps in which norms are added up.
        first: Steps before the window.

    Attributes:
        channels: The wider channels of each layer, once they are chosen.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(20, 4)), "tetrajet2")
        >>> control = qsim.control.OutControl(window=1).start(model)
        >>> x = torch.ones(8, 20)
        >>> x[:, 3], x[:, 17] = 50.0, -40.0
        >>> _ = model(x)
        >>> control.step()
        >>> control.channels, model[0].points.weight.function.channels
        ({'0': [3, 17]}, (3, 17))
    """

    needs = "linear layer with rounded inputs and weights"

    def __init__(self, *, share: float = 0.1, wider: Point = "mxfp8", window: int = 50, first: int = 0) -> None:
        super().__init__()
        self.share = check_number("OutControl", "share", share, 0.0, 1.0)
        self.wider = quantizer_of("OutControl", wider, scales=True)
        self.window = check_integer("OutControl", "window", window, 1, 2**31)
        self.first = check_integer("OutControl", "first", first, 0, 2**62)
        self.channels: dict[str, list[int]] = {}
        self._norms: dict[str, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def controls(self, layer: Layer) -> bool:  # noqa: D102 (documented above)
        return super().controls(layer) and layer.points.act is not None and layer.points.weight is not None

    def begin(self, layers: dict[str, Layer]) -> None:  # noqa: D102 (documented above)
        if self.first == self.steps:
            self._begin_window(layers)

    def advance(self, layers: dict[str, Layer]) -> None:  # noqa: D102 (documented above)
        if self.steps == self.first:
            self._begin_window(layers)
        if self.steps == self.first + self.window:
            for hook in self._hooks:
                hook.remove()
            norms, self._norms = self._norms, {}
            self._choose(layers, {name: self._largest(of) for name, of in norms.items()})

    def resume(self, layers: dict[str, Layer], state: Mapping[str, Any]) -> None:  # noqa: D102 (documented above)
        if self.first <= self.steps < self.first + self.window:
            self._begin_window(layers)
            for name, norms in state["layers"].items():
                self._norms[name].copy_(norms)
        elif self.steps >= self.first + self.window:
            self._choose(layers, dict(state["layers"]))

    def kept(self) -> dict[str, Any]:  # noqa: D102 (documented above)
        return dict(self._norms or self.channels)

    def _begin_window(self, layers: dict[str, Layer]) -> None:
        for name, layer in layers.items():
            weight = weight_of(layer)
            self._norms[name] = weight.new_zeros(weight.shape[1], dtype=torch.float32)
            self._hooks.append(layer.register_forward_pre_hook(_Adds(self._norms[name])))

    def _largest(self, norms: Tensor) -> list[int]:
        """The channels with the largest norms, in order."""
        count = min(max(round(self.share * len(norms)), 1), len(norms) - 1)
        return sorted(agreed(norms).topk(count).indices.tolist())

    def _choose(self, layers: dict[str, Layer], channels: dict[str, list[int]]) -> None:
        """Give the chosen channels the wider format."""
        for name, chosen in channels.items():
            layer = layers[name]
            # A loaded model may have them already.
            if not _has_channels(layer.points):
                layer.points = self._with_channels(layer.points, chosen).with_own_modules()
        self.channels = channels

    def _with_channels(self, points: FivePoint, chosen: list[int]) -> FivePoint:
        # Both operands of a product are transformed alike, and those of channels by modules.
        points = replace(points, **{name: _turned(getattr(points, name)) for name in POINTS})

        def split(point: Quantizer | CallablePoint | None, dim: int = -1) -> Channels:
            return Channels(point.function if isinstance(point, CallablePoint) else point, self.wider, chosen, dim)

        act, weight = split(points.act), split(points.weight)
        changed: dict[str, Any] = {"act": act, "weight": weight}
        if points.act_bwd not in REUSES or act.is_directed:
            # A point that rounds along the sum gets its tensor transposed there.
            turned = split(points.used["act_bwd"], dim=-2)
            changed["act_bwd"] = turned if turned.is_directed else split(points.used["act_bwd"])
        if points.weight_bwd in REUSES and weight.is_directed:
            # The gradient of the input sums over output channels: all channels have the narrow format there.
            changed["weight_bwd"] = points.weight
        return replace(points, **changed)


class _Adds:
    """A hook that adds the norms of a layer's input channels to a tensor."""

    def __init__(self, norms: Tensor) -> None:
        self.norms = norms

    def __call__(self, layer: nn.Module, given: tuple[Any, ...]) -> None:
        if layer.training:
            x = given[0].detach()
            self.norms += torch.linalg.vector_norm(x.reshape(-1, x.shape[-1]), dim=0, dtype=torch.float32)


def _turned(point: Any) -> Any:
    """A quantizer with a transform as a module, which undoes it; any other point unchanged."""
    if not isinstance(point, Quantizer) or point.transform is None:
        return point
    return Rotated(replace(point, transform=None), point.transform)


def _has_channels(points: FivePoint) -> bool:
    return isinstance(points.act, CallablePoint) and isinstance(points.act.function, Channels)
