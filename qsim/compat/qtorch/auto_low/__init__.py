"""Rounding of the outputs of a model's layers, without rewriting the model."""

from qsim.compat.qtorch.auto_low.auto_low import lower, sequential_lower

__all__ = ["lower", "sequential_lower"]
