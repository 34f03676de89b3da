"""Rounding behind the layers of a model, without writing a new one."""

from qsim.compat.qtorch.auto_low.auto_low import lower, sequential_lower

__all__ = ["lower", "sequential_lower"]
