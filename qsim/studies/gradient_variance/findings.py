"""Slopes, factors and shares of the study `gradient-variance`, each with its interval over seeds."""

from __future__ import annotations

import math

import numpy as np

from qsim.studies.findings import Findings, Values
from qsim.studies.gradient_variance import BACKWARD, WEIGHTS, Settings, ends, middle, swept
from qsim.studies.statistics import Interval, mean, positive


class VarianceFindings(Findings[Settings]):
    """The results of a study, grouped by run.

    Attributes:
        batch: The batch size at which numbers of bits are compared.
        swept: The mantissas that are measured at all batch sizes.
        fewest: The fewest mantissa bits.
    """

    def begin(self) -> None:
        """Find the sizes at which everything is compared."""
        self.batch, self.swept = middle(self.settings), swept(self.settings)
        self.fewest = self.swept[0]

    def backward(self, what: str, mantissa: int, batch: int = 0, rounding: str = "stochastic") -> Values:
        """One value of the backward pass for each seed; without a batch size, at the middle one."""
        return self.over_seeds(what, rounded=BACKWARD, bits=mantissa, rounding=rounding, batch=batch or self.batch)

    def weights(self, what: str, fraction: int, rounding: str, batch: int = 0) -> Values:
        """One value of rounded weights for each seed; without a batch size, at the middle one."""
        return self.over_seeds(what, rounded=WEIGHTS, bits=fraction, rounding=rounding, batch=batch or self.batch)

    def slope_in_batch(self, what: str, mantissa: int) -> Interval:
        """The power of the batch size with which a variance scales: least squares for each seed, then their mean."""
        batches = self.settings.batches
        return mean(np.polyfit(np.log(batches), np.log([self.backward(what, mantissa, batch) for batch in batches]), 1)[0])

    def factor(self, fewer: int, more: int) -> Interval:
        """The factor by which one bit less multiplies the variance of rounding, averaged over the bits between two mantissas."""
        return mean((self.backward("rounding", fewer) / self.backward("rounding", more)) ** (1 / (more - fewer)))

    def bits(self, fewer: int, more: int) -> Interval:
        """The same in bits for each bit: 1 is a factor of 4."""
        return mean(np.log(self.backward("rounding", fewer) / self.backward("rounding", more)) / math.log(4) / (more - fewer))

    def batch_factor(self, fewer: int, more: int) -> Interval:
        """Return the factor by which the batch must grow per bit less, for gradients with the same total variance."""
        coarse, fine = (self.backward("rounding", bits) + self.backward("sampling", bits) for bits in (fewer, more))
        return mean((coarse / fine) ** (1 / (more - fewer)))

    def product(self, mantissa: int) -> Interval:
        """The excess of the variance of rounding both operands over the sum of rounding one at a time."""
        inputs, gradients = (self.backward(f"rounding_of_{operand}", mantissa) for operand in ("inputs", "gradients"))
        return mean(self.backward("rounding", mantissa) / (inputs + gradients) - 1)

    def squared_bias(self, mantissa: int, rounding: str) -> Interval:
        """The squared bias of the backward pass relative to the squared gradient."""
        bias, gradient = (self.backward(f"squared_{what}", mantissa, 0, rounding) for what in ("bias", "gradient"))
        return mean(bias / gradient)

    def slope_of_bias(self, fraction: int, rounding: str) -> Interval:
        """The power of the batch size with which the squared bias scales."""
        first, *_, last = ends(self.settings)
        pairs = zip(*(self.weights("squared_bias", fraction, rounding, batch) for batch in (first, last)), strict=True)
        return mean([math.log(b / a) / math.log(last / first) if a > 0 and b > 0 else math.nan for a, b in pairs])

    def share_of_bound(self, fraction: int, rounding: str) -> Interval:
        """The bias of rounded weights relative to the bound."""
        return positive(self._bias(fraction, rounding) / self.weights("bound", fraction, rounding))

    def relative_bias(self, fraction: int, rounding: str) -> Interval:
        """The bias of rounded weights relative to the gradient."""
        return positive(self._bias(fraction, rounding) / np.sqrt(self.weights("squared_gradient", fraction, rounding)))

    def _bias(self, fraction: int, rounding: str) -> Values:
        """The norm of the bias of rounded weights; estimates of a square that are below zero count as zero."""
        return np.sqrt(np.maximum(self.weights("squared_bias", fraction, rounding), 0.0))
