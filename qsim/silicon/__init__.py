"""From a format to silicon: the arithmetic as C, SystemVerilog and JavaScript, golden vectors, and what it costs in hardware."""

from qsim.silicon.blocks import BlockCircuit
from qsim.silicon.checking import Comparison, check
from qsim.silicon.circuits import Circuit
from qsim.silicon.coverage import VectorCoverage, coverage
from qsim.silicon.dots import Dot
from qsim.silicon.emission import emit, emit_circuits
from qsim.silicon.generators import Philox
from qsim.silicon.proving import prove
from qsim.silicon.synthesis import Cost, cost
from qsim.silicon.texts import FORMS, read, text
from qsim.silicon.vectors import Vectors, vectors

__all__ = [
    "FORMS",
    "Cost",
    "VectorCoverage",
    "BlockCircuit",
    "Comparison",
    "Circuit",
    "Dot",
    "Philox",
    "Vectors",
    "check",
    "cost",
    "coverage",
    "emit",
    "emit_circuits",
    "prove",
    "read",
    "text",
    "vectors",
]
