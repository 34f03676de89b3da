"""Bias and variance of a model's gradients, point by point: Lemma 2 of *Training with Fewer Bits*, measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from qsim.diagnostics.gradients.borrowed import borrowed
from qsim.diagnostics.gradients.drawn import Gradients, Loss, MeasuredWeights, check_arguments, listed_batches, weights_of
from qsim.diagnostics.gradients.error import GradientError
from qsim.diagnostics.gradients.points import NAMES, alone, quantizer_of
from qsim.diagnostics.gradients.statistics import Moments, rounding_variance, sampling, squared_bias
from qsim.diagnostics.gradients.text import in_percent
from qsim.nn.record import points_of_module
from qsim.random import streams
from qsim.recipes.five_point import FivePoint
from qsim.text.records import Records, Values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The row of all weights together, and the two rows that are not points: everything rounded, and nothing.
ALL_WEIGHTS, ALL, NONE = "all weights", "all", "none"


def _relative(name: str) -> Callable[[GradientError], float]:
    """A function that returns a part of an error relative to the squared gradient, whose estimate can be negative if it is almost zero."""
    return lambda error: float(getattr(error, name).value / max(error.gradient.value, sys.float_info.min))


@dataclass(frozen=True)
class GradientErrors(Records[GradientError]):
    """Bias and variance of gradients, for each layer and point; prints as a table.

    Attributes:
        records: The errors.
        batches: Number of batches.
        draws: Number of draws per batch.
        level: Confidence level of the intervals.

    Example:
        >>> import torch, qsim
        >>> _ = torch.manual_seed(0)
        >>> model = qsim.convert(torch.nn.Linear(8, 4), qsim.FivePoint(weight="e4m1", weight_bwd="same"))
        >>> found = qsim.diagnostics.gradient_error(model, lambda model, x: model(x).square().mean(), list(torch.randn(8, 16, 8)))
        >>> found.batches, [error.point for error in found.filter(layer="all weights")]
        (8, ['none', 'weight', 'weight_bwd', 'all'])
    """

    batches: int
    draws: int
    level: float

    COLUMNS: ClassVar[Values] = dict(
        zip(("layer", "point", "|bias|²", "sampling", "rounding", "|gradient|²"), (f.name for f in fields(GradientError)), strict=True)
    )
    NAME: ClassVar[str] = "errors"
    LOSSES: ClassVar[Values] = {name: _relative(name) for name in ("bias", "sampling", "rounding")}

    def of(self, point: str, layer: str = ALL_WEIGHTS) -> GradientError:
        """Return the error at a point, of all weights or of one layer: the same as `errors[layer, point]`."""
        return self[layer, point]

    def totals(self) -> GradientErrors:
        """Errors of all weights together."""
        return self.filter(layer=ALL_WEIGHTS)

    def _below(self) -> list[str]:
        measured = f"{self.batches} batches, each drawn {self.draws} times"
        return [f"squared norms, with intervals of {in_percent(self.level)}, from {measured}"]

    def plot(self, ax: Axes | None = None, layer: str = ALL_WEIGHTS) -> Axes:
        """Draw a layer's squared bias and both variances as bars, for each point, relative to its squared gradient.

        Args:
            ax: The axes to draw on; new ones by default.
            layer: The layer.
        """
        from qsim.diagnostics.gradients.figure import bars

        return bars(self.filter(layer=self.of(NONE, layer).layer), ax)


def gradient_error(
    model: nn.Module, loss: Loss, batches: Iterable[Any], draws: int = 8, *, seed: int = 0, level: float = 0.95
) -> GradientErrors:
    """Measure bias and variance of a converted model's gradients, for each of its points separately and for all together.

    The measured point rounds in all layers, the others do not round. Bias is against the same model in full precision, on the same batches,
    and variance is split into what batches and what rounding contribute. Stochastic rounding in the backward pass only adds variance (Lemma
    2). Rounding in the forward pass, above all of weights, changes the loss whose gradient is taken: a bias that no batch size removes
    (Lemma 1).

    Gradients are those of the weights of converted layers, which are matrices, tables and kernels, and of modules that multiply by
    parameters of their own, such as mixtures of experts. Each draw rounds again, including weights. Estimates are unbiased, so that an
    estimate of zero can be negative as well as positive; intervals come from leaving out one batch at a time, and hold for batches drawn
    independently. The model, its gradients and buffers, the histories of delayed scales and torch's generators are restored; `seed`
    determines all draws, also those of a loader that shuffles. Gradients of all batches are stored at once, twice.

    Args:
        model: A model converted by `qsim.convert`.
        loss: `loss(model, batch)`, a scalar; rounding must be its only source of random numbers, so no dropout.
        batches: At least 3 batches, of one size.
        draws: Number of draws per batch where rounding is stochastic.
        seed: The seed of all random bits.
        level: Confidence level of the intervals.

    Returns:
        An error of each layer for each point that rounds, for `"all"` and for `"none"`; and the same for all weights together.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model has no points, batches or draws are too few, batches differ in size, or the loss is not a scalar or draws
            random numbers.

    Example:
        >>> import torch, qsim
        >>> from qsim.diagnostics import gradient_error
        >>> _ = torch.manual_seed(0)
        >>> points = qsim.FivePoint(act_bwd=qsim.Quantizer("e4m1", "stochastic"))
        >>> model = qsim.convert(torch.nn.Linear(8, 4), points)
        >>> batches = list(torch.randn(5, 16, 8))
        >>> found = gradient_error(model, lambda model, x: model(x).square().mean(), batches, draws=4)
        >>> error = found.of("act_bwd")
        >>> error.bias.low < 0 < error.bias.high and error.rounding.low > 0
        True
        >>> [row["point"] for row in found.rows() if row["layer"] == "all weights"]
        ['none', 'act_bwd', 'all']
    """
    check_arguments("gradient_error", draws, seed, level)
    weights = weights_of("gradient_error", model)
    settings = _settings(weights)
    with borrowed(model, weights.layers, streams.stream("gradient_error", seed)) as state:
        given = listed_batches("gradient_error", batches)
        drawn = Gradients("gradient_error", model, loss, given, weights, state)
        found = {NONE: (drawn.full_precision(), 1)}
        for name, points in settings.items():
            count = draws if draws_bits(points) else 1
            found[name] = drawn.moments(points, count, redraw_weights=True), count
        norms = drawn.squared_norms()
    errors = tuple(
        _error(title, name, of_all.row(k), count, norms.row(k), level)
        for k, title in enumerate((*weights.owned, ALL_WEIGHTS))
        for name, (of_all, count) in found.items()
    )
    return GradientErrors(errors, len(given), draws, level)


def _settings(weights: MeasuredWeights) -> dict[str, list[FivePoint]]:
    """The points of each layer, for each point that any layer has, on its own, and for all."""
    own = [points for layer in weights.layers if (points := points_of_module(layer)) is not None]
    names = [name for name in NAMES if any(quantizer_of(points, name) is not None for points in own)]
    chosen = {name: [alone(points, name) for points in own] for name in names} | {ALL: own}
    return {name: weights.in_use(of_all) for name, of_all in chosen.items()}


def draws_bits(points: Sequence[FivePoint]) -> bool:
    """Whether anything is rounded stochastically, so that two draws can differ."""
    return any(own.is_stochastic or own.weight_is_stochastic for own in points)


def _error(layer: str, point: str, found: Moments, draws: int, norms: Moments, level: float) -> GradientError:
    measured = squared_bias(found), sampling(found, draws), rounding_variance(found), squared_bias(norms)
    return GradientError(layer, point, *(part.estimate(level) for part in measured))
