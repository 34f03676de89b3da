"""Optimizers in low precision."""

from qsim.compat.qtorch.optim.optim_low import OptimLP

__all__ = ["OptimLP"]
