"""The factor by which a batch must grow: Lemma 3 and Theorem 1 of *Training with Fewer Bits*, measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn

from qsim.diagnostics.gradients.borrowed import borrowed
from qsim.diagnostics.gradients.drawn import Gradients, Loss, MeasuredWeights, check_arguments, listed_batches, weights_of
from qsim.diagnostics.gradients.errors import ALL_WEIGHTS, draws_bits
from qsim.diagnostics.gradients.points import NAMES, quantizer_of
from qsim.diagnostics.gradients.range_checks import check_range, check_underflow
from qsim.diagnostics.gradients.statistics import Estimate, Moments, rounding_variance, sampling, squared_bias
from qsim.diagnostics.gradients.text import in_percent
from qsim.formats import Float
from qsim.nn.converting.checks import check_layer
from qsim.nn.converting.layers import Layer
from qsim.nn.modules import FivePointModule
from qsim.random import streams
from qsim.recipes.five_point import FivePoint
from qsim.recipes.points_of import points_of
from qsim.recipes.recipe import Recipe
from qsim.text.records import Records, Values

Points = FivePoint | Recipe | str | Mapping[str, Any] | None


@dataclass(frozen=True)
class BatchFactor:
    """The factor by which the batch must grow for a layer's gradient to vary as little.

    Attributes:
        layer: The layer whose gradient it is, or `"all weights"`.
        factor: Ratio of the variance under the points to that under the points for comparison.
        sampling: Variance from batch to batch under the points.
        rounding: Variance from draw to draw under the points.
        like: Total variance under the points for comparison.
        bias: Squared norm of the gradient's mean error, which no batch size removes.
        gradient: Squared norm of the gradient in full precision, for comparison.

    Example:
        >>> import torch, qsim
        >>> _ = torch.manual_seed(0)
        >>> model = qsim.convert(torch.nn.Linear(8, 4), qsim.FivePoint())
        >>> points = qsim.FivePoint(act_bwd=qsim.Quantizer("e5m0", "stochastic"))
        >>> found = qsim.diagnostics.batch_for(model, lambda model, x: model(x).square().mean(), list(torch.randn(32, 16, 8)), points)
        >>> [factor.layer for factor in found]
        ['(the model)', 'all weights']
        >>> found[-1].rounding.value > 0
        True
    """

    layer: str
    factor: Estimate
    sampling: Estimate
    rounding: Estimate
    like: Estimate
    bias: Estimate
    gradient: Estimate


@dataclass(frozen=True)
class BatchFactors(Records[BatchFactor]):
    """Factors by which the batch must grow, for each layer and for all weights; prints as a table.

    Attributes:
        records: One for each layer, followed by that of all weights.
        points: Points at which the model rounds.
        compared_with: Points for comparison.
        bound: `4**k` if `points` has `k` mantissa bits fewer than those for comparison wherever the two differ (Theorem 1), else `None`.
            This is the effect of steps twice as wide for numbers spread evenly between two neighbours; for given numbers it can be somewhat
            more or less. If both operands of ∇W are rounded to very few bits, the product of their errors adds to it.
        level: Confidence level of the intervals.

    Example:
        >>> import torch, qsim
        >>> _ = torch.manual_seed(0)
        >>> model = qsim.convert(torch.nn.Linear(8, 4), qsim.FivePoint())
        >>> points = qsim.FivePoint(act_bwd=qsim.Quantizer("e5m0", "stochastic"))
        >>> found = qsim.diagnostics.batch_for(model, lambda model, x: model(x).square().mean(), list(torch.randn(32, 16, 8)), points)
        >>> found.factor == found["all weights",].factor, found.level
        (True, 0.95)
    """

    points: str
    compared_with: str
    bound: float | None
    level: float

    COLUMNS: ClassVar[Values] = dict(
        zip(
            ("layer", "batch ×", "sampling", "rounding", "like", "|bias|²", "|gradient|²"),
            (f.name for f in fields(BatchFactor)),
            strict=True,
        )
    )
    KEY: ClassVar[tuple[str, ...]] = ("layer",)
    NAME: ClassVar[str] = "factors"
    LOSSES: ClassVar[Values] = {"factor": lambda factor: factor.factor.value}

    @property
    def factor(self) -> Estimate:
        """Factor of all weights together."""
        return self[-1].factor

    def totals(self) -> BatchFactors:
        """Factor of all weights together."""
        return self[-1:]

    def _below(self) -> list[str]:
        lines = [f"points: {self.points}", f"like: {self.compared_with}"]
        lines.append(f"squared norms, with intervals of {in_percent(self.level)}; batch × is (sampling + rounding) / like")
        if self.bound is not None:
            lines.append(f"Theorem 1: at most {self.bound:g} times, 4 for each mantissa bit, to leading order")
        return [*lines, _of_bias(self[-1])]


def _of_bias(factor: BatchFactor) -> str:
    if factor.bias.low > 0:
        share = max(factor.bias.value, 0.0) ** 0.5 / factor.gradient.value**0.5 if factor.gradient.value > 0 else float("nan")
        return f"no batch size removes the bias: {in_percent(float(f'{share:.2g}'))} of the gradient's norm"
    return "no bias found: the interval of the squared bias contains 0"


def batch_for(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    points: Points,
    like: Points = None,
    draws: int = 8,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> BatchFactors:
    """Measure the factor by which the batch must grow with some points for gradients to vary as little as with others.

    That is `(σ_S² + σ_Q²(points)) / (σ_S² + σ_Q²(like))`, both from the same batches: each gradient's variance is that of one batch, and
    falls as the reciprocal of its size if samples are rounded independently (Lemma 3). This holds for `act_bwd` and `grad`, unless samples
    share a scale. Weights are rounded once, not for each draw, because all samples of a batch share that rounding: its effect on the
    gradient is counted as bias (Lemma 1), which no batch size removes.

    A loss that is a mean makes each sample's gradient smaller in a larger batch, and rounding errors near the smallest numbers of a format
    do not shrink with it. So there is no factor, but an error, if half of the gradients at a point without a scale underflow, or if the
    rounding variance for half the loss shows that it would not fall with the batch. Whether the loss is a mean is found by halving the
    tensors of a batch, and gradients are drawn once more for half the loss.

    The requirements for batches and losses are those of `gradient_error`, which also leaves the model unchanged.

    Args:
        model: A model converted by `qsim.convert`; its own points are ignored during the measurement, except that modules that multiply
            by parameters of their own are only measured if they round.
        loss: `loss(model, batch)`, a scalar; rounding must be its only source of random numbers.
        batches: At least 3 batches, of one size.
        points: The points of all converted layers: a `FivePoint`, a dictionary that describes one, or a recipe, whose first and last layers
            stay in full precision. `None`: no rounding.
        like: Points for comparison.
        draws: Number of draws per batch.
        seed: The seed of all random bits.
        level: Confidence level of the intervals.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model has no points, a layer cannot round at those given, batches or draws are too few, batches differ in size,
            gradients do not vary at all, gradients underflow, rounding
            variance does not fall with the batch, or the loss is not a scalar or draws random numbers.

    Example:
        >>> import torch, qsim
        >>> from qsim.diagnostics import batch_for
        >>> _ = torch.manual_seed(0)
        >>> model = qsim.convert(torch.nn.Linear(8, 4), qsim.FivePoint())
        >>> points = qsim.FivePoint(act_bwd=qsim.Quantizer("e5m0", "stochastic"))
        >>> batches = list(torch.randn(32, 16, 8))
        >>> found = batch_for(model, lambda model, x: model(x).square().mean(), batches, points)
        >>> found.factor.low > 1
        True
    """
    return measured_factors(model, loss, batches, points, like, draws, seed, level, is_checked=True)


def measured_factors(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    points: Points,
    like: Points,
    draws: int,
    seed: int = 0,
    level: float = 0.95,
    *,
    is_checked: bool = False,
) -> BatchFactors:
    """The result of `batch_for`; studies of what happens out of range take it unchecked."""
    check_arguments("batch_for", draws, seed, level)
    weights = weights_of("batch_for", model)
    settings = [_settings(weights, given) for given in (points, like)]
    with borrowed(model, weights.layers, streams.stream("batch_for", seed)) as state:
        drawn = Gradients("batch_for", model, loss, listed_batches("batch_for", batches), weights, state)
        counts = [draws if draws_bits(of_all) else 1 for of_all in settings]
        found, other = (drawn.moments(of_all, count, redraw_weights=False) for of_all, count in zip(settings, counts, strict=True))
        norms = drawn.squared_norms()
        if is_checked:
            for name, of_all, measured in zip(("points", "like"), settings, (found, other), strict=True):
                check_range(drawn, weights, of_all, measured.row(-1), draws, level, name)
    factors = [
        _factor(title, found.row(k), other.row(k), norms.row(k), counts, level) for k, title in enumerate((*weights.owned, ALL_WEIGHTS))
    ]
    return BatchFactors(tuple(factors), _words(points), _words(like), _bound(points, like), level)


def refuse_underflow(function: str, model: nn.Module, loss: Loss, batch: Any, points: Points, argument: str) -> None:
    """Raise an error if gradients underflow in a batch, as `batch_for` does, for other questions that they would decide.

    Args:
        function: The name of the caller in errors.
        model: A converted model.
        loss: A function of the model and a batch that returns the loss.
        batch: The batch.
        points: The points of all layers.
        argument: The name of what the points come from.
    """
    weights = weights_of(function, model)
    with borrowed(model, weights.layers, streams.stream(function, 0)) as state:
        drawn = Gradients(function, model, loss, [batch], weights, state)
        check_underflow(function, drawn, weights, _settings(weights, points), argument)


def _settings(weights: MeasuredWeights, given: Points) -> list[FivePoint]:
    """The points of each layer."""
    points, count = points_of(given), len(weights.layers)
    first, last = (given.first, given.last) if isinstance(given, Recipe) else (0, 0)
    chosen = [points if first <= i < count - last else FivePoint() for i in range(count)]
    for name, layer, own in zip(weights.names, weights.layers, chosen, strict=True):
        check_layer(Layer((name,), layer, ""), own)
    kept = (layer.own_points(own) if isinstance(layer, FivePointModule) else own for layer, own in zip(weights.layers, chosen, strict=True))
    return weights.in_use([*kept])


def _factor(layer: str, found: Moments, other: Moments, norms: Moments, counts: list[int], level: float) -> BatchFactor:
    parts = sampling(found, counts[0]), rounding_variance(found)
    total, like = parts[0].plus(parts[1]), sampling(other, counts[1]).plus(rounding_variance(other))
    for name, of_all in (("points", total), ("like", like)):
        if not math.isfinite(of_all.value):
            raise ValueError(f"batch_for: the gradient of {layer} has infinities or NaN under {name}: check batches, loss and overflow=")
    if float(like.value) <= 0:
        raise ValueError(f"batch_for: the gradient of {layer} does not vary under like: batches must differ, got identical ones")
    measured = (*parts, like, squared_bias(found), squared_bias(norms))
    return BatchFactor(layer, total.over(like).ratio_estimate(level), *(part.estimate(level) for part in measured))


def _words(points: Points) -> str:
    return str(points) if isinstance(points, Recipe) else "full precision" if points is None else str(points_of(points))


def _bound(points: Points, like: Points) -> float | None:
    """4 for each mantissa bit by which `points` is below `like`, if that number is the same at every point that differs."""
    removed = set()
    for name in NAMES:
        few, many = (quantizer_of(points_of(given), name) for given in (points, like))
        if few == many:
            continue
        if few is None or many is None or not isinstance(few.format, Float) or not isinstance(many.format, Float):
            return None
        removed.add(many.format.mantissa - few.format.mantissa)
    return 4.0 ** removed.pop() if len(removed) == 1 and min(removed) >= 0 else None
