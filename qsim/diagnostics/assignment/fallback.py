"""Fallback during a run: a layer whose error or underflow exceeds a bound gets wider points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from qsim.diagnostics.assignment.choices import measurable
from qsim.diagnostics.assignment.operands import is_one_product
from qsim.diagnostics.assignment.probe import probing
from qsim.diagnostics.assignment.sensitivity import Sensitivities
from qsim.diagnostics.gradients.drawn import Loss
from qsim.formats.base import check_integer
from qsim.nn.converting.checks import check_layer
from qsim.nn.converting.layers import Layer, layers as layers_of
from qsim.nn.coverage.run import check_plain
from qsim.nn.modules import FivePointModule
from qsim.recipes.points_of import PointsLike, points_of
from qsim.text.records import Records, Values


@dataclass(frozen=True)
class Moved:
    """A layer that got wider points.

    Attributes:
        layer: The layer.
        step: The number of optimizer steps before.
        error: The mean squared error that its points made in the gradients of all weights, relative to these.
        underflowed: The share of elements that became zero, of its worst tensor.

    Example:
        >>> from qsim.diagnostics import Moved
        >>> Moved("blocks.0.up", step=200, error=0.3, underflowed=0.02).layer
        'blocks.0.up'
    """

    layer: str
    step: int
    error: float
    underflowed: float


@dataclass(frozen=True)
class MovedLayers(Records[Moved]):
    """The layers that got wider points, in the order of the run; prints as a table."""

    COLUMNS: ClassVar[Values] = {
        "layer": "layer",
        "step": "step",
        "error": lambda record: f"{record.error:.1e}",
        "underflowed": lambda record: f"{record.underflowed:.1%}",
    }
    RIGHT: ClassVar[tuple[str, ...]] = ("step", "error", "underflowed")
    NAME: ClassVar[str] = "moved"


class Fallback:
    """Give layers wider points during a run, once their error or their underflow exceeds a bound.

    Every `every` steps it measures what `qsim.assign` measures, for the points that each layer has: the mean squared error that they make
    in the gradients of all weights, and the share of elements that become zero. So a bound on the error is in the units of `error` of an
    `Assignment`. A layer beyond a bound keeps the wider points for the rest of the run. Linear layers and convolutions are measured, and
    the model is in full precision meanwhile; a measurement takes as many passes as `assign` with one candidate.

    It works like a learning rate scheduler: call `start(model)` before the first step and `step()` after each step of the optimizer, and
    save and load its `state_dict`.

    Args:
        to: The wider points: a format, a recipe or points.
        batches: Returns at least 3 batches of one size, on which layers are measured, whenever it is called.
        loss: `loss(model, batch)`, as `assign` takes it: rounding must be its only source of random numbers.
        error: The largest error of a layer, the sum of those of its tensors; no bound by default.
        underflow: The largest share of elements that become zero, of any of its tensors; no bound by default.
        every: The steps from one measurement to the next. The first one is before the first step.
        probes: The number of random directions.
        seed: The seed of directions and of stochastic rounding.

    Raises:
        TypeError: If `batches` is not callable.
        ValueError: If there is no bound, or a bound or a number is out of range.

    Example:
        >>> import torch, qsim
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> data = [(torch.randn(64, 32) * torch.logspace(-3, 1, 32), torch.randint(8, (64,))) for _ in range(3)]
        >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> qsim.convert(model, "e4m3")[0].points.act.format
        Float(4, 3, specials='fn')
        >>> fallback = qsim.diagnostics.Fallback("bf16", lambda: data, loss, underflow=0.1).start(model)
        >>> [record.layer for record in fallback.moved], model[0].points.act.format.bits
        (['0', '2'], 16)
    """

    def __init__(
        self,
        to: PointsLike,
        batches: Callable[[], Iterable[Any]],
        loss: Loss | None = None,
        *,
        error: float | None = None,
        underflow: float | None = None,
        every: int = 500,
        probes: int = 2,
        seed: int = 0,
    ) -> None:
        if not callable(batches):
            raise TypeError(f"Fallback: batches must be a function that returns batches, got {type(batches).__name__}")
        if error is None and underflow is None:
            raise ValueError("Fallback: give a bound, error= or underflow=")
        for name, bound, most in (("error", error, float("inf")), ("underflow", underflow, 1.0)):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, (int, float)) or not 0 <= bound <= most):
                raise ValueError(f"Fallback: {name} must be a number from 0 to {most:g}, got {bound!r}")
        self._to = points_of(to)
        self._batches, self._loss, self._error, self._underflow = batches, loss, error, underflow
        self._every = check_integer("Fallback", "every", every, 1, 2**62)
        self._probes = check_integer("Fallback", "probes", probes, 1, 10_000)
        self._seed = check_integer("Fallback", "seed", seed, -(2**63), 2**63 - 1)
        self._model: nn.Module | None = None
        self._layers: dict[str, FivePointModule] = {}
        self._steps, self._moved = 0, list[Moved]()

    def start(self, model: nn.Module) -> Fallback:
        """Bind it to a converted model, and measure; after `load_state_dict`, layers that had wider points get them again instead.

        Args:
            model: The model.

        Returns:
            The fallback.

        Raises:
            TypeError: If it is not a module.
            ValueError: If no layer can be measured, a layer cannot have the wider points or has points that cannot be measured, or a loaded
                state is that of another model.
        """
        check_plain("Fallback", model)
        known = {layer.names[0]: layer for layer in layers_of(model) if _is_measured(layer)}
        if not known:
            raise ValueError("Fallback: the model has no linear layer or convolution that rounds: call qsim.convert on it first")
        unknown = [record.layer for record in self._moved if record.layer not in known]
        if unknown:
            raise ValueError(f"Fallback: the state has a layer {unknown[0]!r}, and the model has {', '.join(known)}")
        for name, layer in known.items():
            check_layer(layer, self._to)
            measurable("Fallback", f"the layer {name}", layer.module.points)  # type: ignore[arg-type]
        self._model, self._layers = model, {name: layer.module for name, layer in known.items()}  # type: ignore[misc]
        for record in self._moved:
            self._widen(record.layer)
        if not self._steps:
            self._measure()
        return self

    def step(self) -> None:
        """Count a step of the optimizer, and measure if it is time. Call it after the optimizer's `step`.

        Raises:
            RuntimeError: If it has not been started.
        """
        if self._model is None:
            raise RuntimeError("Fallback: start it first, with fallback.start(model)")
        self._steps += 1
        if self._steps % self._every == 0:
            self._measure()

    @property
    def moved(self) -> MovedLayers:
        """The layers that got wider points."""
        return MovedLayers(tuple(self._moved))

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and the layers that got wider points."""
        return {"steps": self._steps, "moved": [vars(record).copy() for record in self._moved]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state; then call `start`.

        Raises:
            ValueError: If it is not the state of a fallback.
        """
        if set(state_dict) != {"steps", "moved"}:
            raise ValueError(f"Fallback: a state has steps and moved, got {', '.join(map(str, state_dict)) or 'nothing'}")
        self._steps, self._moved = state_dict["steps"], [Moved(**record) for record in state_dict["moved"]]

    def _measure(self) -> None:
        """Measure the layers that have not got wider points, and give these to those beyond a bound."""
        assert self._model is not None
        before = {record.layer for record in self._moved}
        names = [name for name in self._layers if name not in before]
        if not names:
            return
        points = {name: self._layers[name].points for name in names}
        with probing("Fallback", self._model, self._batches(), self._loss, names, self._seed + self._steps) as probe:
            found = probe.measure({"points": points}, self._probes)
        for name in names:
            self._check(name, found.filter(layer=name))

    def _check(self, name: str, found: Sensitivities) -> None:
        error, underflowed = sum(record.error for record in found), max(record.underflowed for record in found)
        is_beyond = self._error is not None and not error <= self._error
        if is_beyond or (self._underflow is not None and underflowed > self._underflow):
            self._moved.append(Moved(name, self._steps, error, underflowed))
            self._widen(name)

    def _widen(self, name: str) -> None:
        layer = self._layers[name]
        layer.points = layer.own_points(self._to)
        layer.remember()


def _is_measured(layer: Layer) -> bool:
    return is_one_product(layer.module) and isinstance(layer.module, FivePointModule) and not layer.module.points.is_identity
