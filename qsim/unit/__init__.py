"""Every operator rounds: arithmetic units of any format, for code as it is."""

from qsim.unit.context import fpu

__all__ = ["fpu"]
