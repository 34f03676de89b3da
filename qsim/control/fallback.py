"""Fallback: layers whose error or underflow exceeds a bound get wider points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from qsim.control.base import Control, Layer, agreed, weight_of
from qsim.diagnostics.assignment.choices import measurable
from qsim.diagnostics.assignment.operands import is_one_product
from qsim.diagnostics.assignment.probe import probing
from qsim.diagnostics.gradients.drawn import Loss
from qsim.formats.base import check_integer
from qsim.nn.converting.checks import check_layer
from qsim.nn.converting.layers import layers as layers_of
from qsim.nn.coverage.run import check_plain
from qsim.recipes.points_of import PointsLike, points_of
from qsim.text.records import Records, Values
from qsim.text.warning import warn

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Moved:
    """A layer that got wider points.

    Attributes:
        layer: The layer.
        step: The number of optimizer steps before.
        error: The mean squared error that its points made in the gradients of all weights, relative to these.
        underflowed: The share of elements that became zero, of its worst tensor.

    Example:
        >>> from qsim.control import Moved
        >>> Moved("blocks.0.up", step=200, error=0.3, underflowed=0.02).layer
        'blocks.0.up'
    """

    layer: str
    step: int
    error: float
    underflowed: float


@dataclass(frozen=True)
class MovedLayers(Records[Moved]):
    """The layers that got wider points, in the order of the run; prints as a table.

    Example:
        >>> from qsim.control import Moved, MovedLayers
        >>> print(MovedLayers((Moved("0", step=200, error=0.3, underflowed=0.02),)))
        layer  step    error  underflowed
        0       200  3.0e-01         2.0%
    """

    COLUMNS: ClassVar[Values] = {
        "layer": "layer",
        "step": "step",
        "error": lambda record: f"{record.error:.1e}",
        "underflowed": lambda record: f"{record.underflowed:.1%}",
    }
    RIGHT: ClassVar[tuple[str, ...]] = ("step", "error", "underflowed")
    NAME: ClassVar[str] = "moved"


class Fallback(Control):
    """Give layers wider points during a run, once their error or their underflow exceeds a bound.

    Every `every` steps it measures what `qsim.assign` measures, for the points that each layer has: the mean squared error that they make
    in the gradients of all weights, and the share of elements that become zero. So a bound on the error is in the units of `error` of an
    `Assignment`. A layer beyond a bound keeps the wider points for the rest of the run. Linear layers and convolutions are measured, and
    the model is in full precision meanwhile; a measurement takes as many passes as `assign` with one candidate.

    A warning says which layer, when and why. In a distributed run each process measures its own batches, and a layer that one moves is
    moved in all.

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
        >>> fallback = qsim.control.Fallback("bf16", lambda: data, loss, underflow=0.1).start(model)
        >>> [record.layer for record in fallback.moved], model[0].points.act.format.bits
        (['0', '2'], 16)
    """

    needs = "linear layer or convolution that rounds"

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
        super().__init__()
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
        self._moved: list[Moved] = []

    def start(self, model: nn.Module) -> Self:
        """Bind it to a converted model, and measure; after `load_state_dict`, layers that had wider points get them again instead.

        Args:
            model: The model.

        Returns:
            The fallback.

        Raises:
            TypeError: If it is not a module, or a layer has a callable, whose bits are not known.
            ValueError: If no layer can be measured, a layer cannot have the wider points or has delayed scales, or a loaded state is of
                another model.
        """
        check_plain("Fallback", model)
        self._model = model
        return super().start(model)

    @property
    def moved(self) -> MovedLayers:
        """The layers that got wider points."""
        return MovedLayers(tuple(self._moved))

    def controls(self, layer: Layer) -> bool:  # noqa: D102 (documented above)
        return is_one_product(layer) and not layer.points.is_identity

    def begin(self, layers: dict[str, Layer]) -> None:  # noqa: D102 (documented above)
        self._check(layers)
        self._measure(layers)

    def advance(self, layers: dict[str, Layer]) -> None:  # noqa: D102 (documented above)
        if self.steps % self._every == 0:
            self._measure(layers)

    def resume(self, layers: dict[str, Layer], state: Mapping[str, Any]) -> None:  # noqa: D102 (documented above)
        self._check(layers)
        self._moved = [Moved(name, *numbers) for name, numbers in state["layers"].items()]
        for record in self._moved:
            self._widen(layers[record.layer])

    def kept(self) -> dict[str, Any]:  # noqa: D102 (documented above)
        return {record.layer: [record.step, record.error, record.underflowed] for record in self._moved}

    def _check(self, layers: dict[str, Layer]) -> None:
        for layer in layers_of(self._model):
            name = layer.names[0]
            if name in layers:
                check_layer(layer, self._to)
                measurable("Fallback", f"the layer {name}", layers[name].points)

    def _measure(self, layers: dict[str, Layer]) -> None:
        """Measure the layers that have not got wider points, and give these to those beyond a bound."""
        before = {record.layer for record in self._moved}
        points = {name: layer.points for name, layer in layers.items() if name not in before}
        if not points:
            return
        with probing("Fallback", self._model, self._batches(), self._loss, list(points), self._seed + self.steps) as probe:
            found = probe.measure({"points": points}, self._probes)
        measured = [found.filter(layer=name) for name in points]
        records = [
            Moved(name, self.steps, sum(record.error for record in own), max(record.underflowed for record in own))
            for name, own in zip(points, measured, strict=True)
        ]
        device = weight_of(layers[records[0].layer]).device
        anywhere = agreed(torch.tensor([float(self._is_beyond(record)) for record in records], device=device))
        for record, is_moved in zip(records, anywhere.tolist(), strict=True):
            if is_moved:
                self._moved.append(record)
                self._widen(layers[record.layer])
                warn(
                    f"Fallback: step {record.step}: {record.layer} has wider points from now on: its error is {record.error:.1e}, and "
                    f"{100 * record.underflowed:.1f} % of a tensor underflow"
                )

    def _is_beyond(self, record: Moved) -> bool:
        is_too_wrong = self._error is not None and not record.error <= self._error
        return is_too_wrong or (self._underflow is not None and record.underflowed > self._underflow)

    def _widen(self, layer: Layer) -> None:
        layer.points = layer.own_points(self._to)
        layer.remember()
