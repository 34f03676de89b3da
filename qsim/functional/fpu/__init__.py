"""Arithmetic units of any format for unmodified code: the output of every operator is rounded."""

from qsim.functional.fpu.context import fpu

__all__ = ["fpu"]
