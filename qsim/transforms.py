"""Transforms applied before rounding: they spread outliers over their neighbours, and cancel in a product of two operands."""

from qsim.functional.hadamard import Hadamard, resolve

__all__ = ["Hadamard", "resolve"]
