"""Checks that a batch can make up for rounding: gradients stay in range, and their rounding variance falls as the batch grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qsim.diagnostics.collecting import POINTS, Collector, Label, LayerObserver, PendingSample
from qsim.diagnostics.counts import Counts
from qsim.diagnostics.gradients.drawn import Gradients, MeasuredWeights
from qsim.diagnostics.gradients.points import NAMES, quantizer_of
from qsim.diagnostics.gradients.statistics import Estimate, Moments, rounding_variance
from qsim.diagnostics.hooks import Watch
from qsim.diagnostics.remedies import loss_scale_up, underflow_share
from qsim.formats import Float
from qsim.functional.quantizer import GRADIENTS, Quantizer
from qsim.recipes.five_point import FivePoint
from qsim.text.percentages import percent

#: Gradients of which this share underflows are refused.
_UNDERFLOW = 0.5
#: The loss divided by this has the gradients per sample of a batch that is as many times larger.
LARGER = 2
#: How many times as large as expected the rounding variance of a larger batch may be.
_SLACK = 1.2


def check_range(
    drawn: Gradients, weights: MeasuredWeights, points: Sequence[FivePoint], found: Moments, draws: int, level: float, argument: str
) -> None:
    """Raise an error if gradients are rounded without a scale, and their errors do not shrink as the batch of a mean loss grows.

    Args:
        drawn: The source of gradients.
        weights: The weights, with their layers.
        points: The points of each layer.
        found: The moments of all weights.
        draws: The number of draws per batch.
        level: The confidence level.
        argument: The name of the argument that the points come from.
    """
    if not _may_underflow(points):
        return
    check_underflow("batch_for", drawn, weights, points, argument)
    variance = rounding_variance(found)
    if variance.value > 0 and drawn.is_mean():
        halved = drawn.moments(points, draws, redraw_weights=False, smaller=LARGER).row(-1)
        _check_falling(rounding_variance(halved).over(variance).ratio_estimate(level), argument)


def check_underflow(function: str, drawn: Gradients, weights: MeasuredWeights, points: Sequence[FivePoint], argument: str) -> None:
    """Raise an error if half of the gradients at a point without a scale underflow in the first batch.

    Args:
        function: The name of the caller in errors.
        drawn: The source of gradients.
        weights: The weights, with their layers.
        points: The points of each layer.
        argument: The name of what the points come from.
    """
    lost = [(counts, quantizer) for counts, quantizer in _unscaled(drawn, weights, points) if underflow_share(counts) >= _UNDERFLOW]
    if lost:
        counts, quantizer = max(lost, key=lambda own: underflow_share(own[0]))
        what = f"{percent(underflow_share(counts))} of the gradients at {counts.point} of layer {counts.layer!r} underflow"
        factor, fmt = loss_scale_up(counts, quantizer), quantizer.format
        scaled = "" if factor is None else f"multiply the loss by {factor:g} or more, or "
        wider = f", such as {Float(8, fmt.mantissa)}" if isinstance(fmt, Float) and fmt.exponent < 8 else ""
        raise ValueError(
            f"{function}: under {argument}, {what}: a larger batch of a mean loss makes each smaller, so no factor holds; "
            f"{scaled}give them a scale, such as scale='tensor', or a format with more exponent bits{wider}"
        )


def _check_falling(ratio: Estimate, argument: str) -> None:
    """Check the ratio of the rounding variance for the loss divided by `LARGER` to that for the loss.

    In a batch that is `LARGER` times larger, gradients of a mean loss are as many times smaller. If rounding errors are proportional to the
    gradients, the ratio is `LARGER**-2`, and the variance of the larger batch, with as many more samples, is `LARGER` times smaller.
    """
    if ratio.low * LARGER**2 > _SLACK:
        raise ValueError(
            f"batch_for: under {argument}, the rounding variance does not fall with the batch: with {LARGER} times the batch of a mean "
            f"loss it would be {ratio.value * LARGER:.2g} times as large, instead of {1 / LARGER:g}, because gradients are near the "
            "smallest numbers of their format; multiply the loss by a constant, give gradients a scale, such as scale='tensor', or a "
            "format with more exponent bits"
        )


def _may_underflow(points: Sequence[FivePoint]) -> bool:
    """Whether any layer rounds gradients without a scale."""
    given = (quantizer_of(own, name) for own in points for name in NAMES if name in GRADIENTS)
    return any(quantizer is not None and quantizer.scale is None for quantizer in given)


def _unscaled(drawn: Gradients, weights: MeasuredWeights, points: Sequence[FivePoint]) -> list[tuple[Counts, Quantizer]]:
    """The counts of gradient points without scales in the first batch, with their quantizers."""
    collector = Collector()
    watch = Watch([(layer, None) for layer in weights.layers], skips_eval=False)
    try:
        watch.begin([LayerObserver(collector, number) for number in range(len(weights.layers))])
        drawn.first(points)
    finally:
        watch.close()
    sample = PendingSample(0, collector, lambda source: Label(str(source.layer), POINTS[source.point], ""), ()).read()
    found = []
    for counts in sample:
        quantizer = quantizer_of(points[int(counts.layer)], counts.point) if counts.point in GRADIENTS else None
        if quantizer is not None and quantizer.scale is None:
            found.append((replace(counts, layer=weights.names[int(counts.layer)]), quantizer))
    return found
