"""What rounding did: to gradients, in one model at one moment."""

from qsim.diagnostics.batches import BatchFactor, BatchFactors, batch_for
from qsim.diagnostics.gradients import GradientError, GradientErrors, gradient_error
from qsim.diagnostics.gradients_statistics import Estimate

__all__ = ["BatchFactor", "BatchFactors", "Estimate", "GradientError", "GradientErrors", "batch_for", "gradient_error"]
