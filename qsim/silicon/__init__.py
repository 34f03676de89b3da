"""From a format to silicon: the arithmetic as C, SystemVerilog and JavaScript, golden vectors, and what it costs in hardware."""

from qsim.silicon.emission import emit
from qsim.silicon.units import Unit

__all__ = ["Unit", "emit"]
