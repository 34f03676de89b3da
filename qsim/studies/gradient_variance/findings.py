"""Slopes, factors and shares of the study `gradient-variance`, each with its interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qsim.studies.findings import Findings
from qsim.studies.gradient_variance import BACKWARD, WEIGHTS, Run, Settings, ends, middle, swept
from qsim.studies.report import Asked
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, mean, positive, slope


class VarianceFindings(Findings[Settings, Run]):
    """The results of a study, grouped by run.

    Attributes:
        batch: The batch size at which numbers of bits are compared.
        swept: The mantissas that are measured at all batch sizes.
        fewest: The fewest mantissa bits.
    """

    def __init__(self, study: Asked, settings: Settings, results: Sequence[Result[Run]]) -> None:
        super().__init__(study, settings, results)
        self.batch, self.swept = middle(settings), swept(settings)
        self.fewest = self.swept[0]

    def backward(self, what: str, mantissa: int, batch: int, rounding: str = "stochastic") -> list[float]:
        """One value of the backward pass for each seed."""
        return self.over_seeds(what, rounded=BACKWARD, bits=mantissa, rounding=rounding, batch=batch)

    def weights(self, what: str, fraction: int, rounding: str, batch: int) -> list[float]:
        """One value of rounded weights for each seed."""
        return self.over_seeds(what, rounded=WEIGHTS, bits=fraction, rounding=rounding, batch=batch)

    def slope_in_batch(self, what: str, mantissa: int) -> Interval:
        """The power of the batch size with which a variance scales: least squares for each seed, then their mean."""
        batches = self.settings.batches
        columns = [self.backward(what, mantissa, batch) for batch in batches]
        if len(batches) == 2:
            reach = math.log(batches[1] / batches[0])
            return mean([math.log(last / first) / reach for first, last in zip(*columns, strict=True)])
        return mean([slope(batches, row).value for row in zip(*columns, strict=True)])

    def factor(self, fewer: int, more: int) -> Interval:
        """The factor by which one bit less multiplies the variance of rounding, averaged over the bits between two mantissas."""
        pairs = zip(*(self.backward("rounding", bits, self.batch) for bits in (fewer, more)), strict=True)
        return mean([(coarse / fine) ** (1 / (more - fewer)) for coarse, fine in pairs])

    def bits(self, fewer: int, more: int) -> Interval:
        """The same in bits for each bit: 1 is a factor of 4."""
        pairs = zip(*(self.backward("rounding", bits, self.batch) for bits in (fewer, more)), strict=True)
        return mean([math.log(coarse / fine, 4) / (more - fewer) for coarse, fine in pairs])

    def batch_factor(self, fewer: int, more: int) -> Interval:
        """Return the factor by which the batch must grow per bit less, for gradients with the same total variance."""
        totals = [
            [a + b for a, b in zip(*(self.backward(what, bits, self.batch) for what in ("rounding", "sampling")), strict=True)]
            for bits in (fewer, more)
        ]
        return mean([(coarse / fine) ** (1 / (more - fewer)) for coarse, fine in zip(*totals, strict=True)])

    def product(self, mantissa: int) -> Interval:
        """The excess of the variance of rounding both operands over the sum of rounding one at a time."""
        both, inputs, gradients = (
            self.backward(what, mantissa, self.batch) for what in ("rounding", "rounding_of_inputs", "rounding_of_gradients")
        )
        return mean([whole / (one + other) - 1 for whole, one, other in zip(both, inputs, gradients, strict=True)])

    def squared_bias(self, mantissa: int, rounding: str) -> Interval:
        """The squared bias of the backward pass relative to the squared gradient."""
        squares = (self.backward(what, mantissa, self.batch, rounding) for what in ("squared_bias", "squared_gradient"))
        return mean([bias / gradient for bias, gradient in zip(*squares, strict=True)])

    def slope_of_bias(self, fraction: int, rounding: str) -> Interval:
        """The power of the batch size with which the squared bias scales."""
        first, *_, last = ends(self.settings)
        pairs = zip(*(self.weights("squared_bias", fraction, rounding, batch) for batch in (first, last)), strict=True)
        return mean([math.log(b / a) / math.log(last / first) if a > 0 and b > 0 else math.nan for a, b in pairs])

    def share_of_bound(self, fraction: int, rounding: str) -> Interval:
        """The bias of rounded weights relative to the bound."""
        bias, bound = (self.weights(what, fraction, rounding, self.batch) for what in ("squared_bias", "bound"))
        return positive([math.sqrt(max(square, 0.0)) / limit for square, limit in zip(bias, bound, strict=True)])

    def relative_bias(self, fraction: int, rounding: str) -> Interval:
        """The bias of rounded weights relative to the gradient."""
        squares = (self.weights(what, fraction, rounding, self.batch) for what in ("squared_bias", "squared_gradient"))
        return positive([math.sqrt(max(bias, 0.0) / gradient) for bias, gradient in zip(*squares, strict=True)])
