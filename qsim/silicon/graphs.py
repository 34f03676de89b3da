"""The graph of a circuit: the definition of its operation, run on symbols."""

from __future__ import annotations

from functools import lru_cache

from qsim.silicon.circuits import Circuit
from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.sum_graphs import dot, philox
from qsim.silicon.values import as_single, code_of, in_carrier, value_of
from qsim_kernels import arithmetic
from qsim_kernels.meanings import symbols
from qsim_kernels.meanings.expressions import Operand, word
from qsim_kernels.meanings.printing import Routine
from qsim_kernels.numbers.carrier import rounding_bits, used_bits, variant_of

#: What can be printed and synthesized.
AnyCircuit = Circuit | Dot | Philox


@lru_cache(maxsize=256)
def routine(circuit: AnyCircuit) -> Routine:
    """The routine that computes a circuit's results, to print in any language."""
    if isinstance(circuit, Dot):
        return dot(circuit)
    if isinstance(circuit, Philox):
        return philox(circuit)
    x = word("x", circuit.input.bits)
    if circuit.operation == "decode":
        return Routine(circuit.name, circuit.specification, (x,), value_of(x, circuit.format), 32)
    value = value_of(x, circuit.source)
    random = (word("random", circuit.random_bits),) if circuit.random_bits else ()
    rounded = _rounded(value, circuit, *random)
    if circuit.operation == "encode":
        rounded = code_of(rounded, circuit.format)
    return Routine(circuit.name, circuit.specification, (x, *random), rounded, circuit.output.bits)


def _rounded(x: Operand, circuit: Circuit, random: Operand = 0) -> Operand:
    """Float32's bits of a rounded number, as a word."""
    rule = circuit.rule
    how = rounding_bits(circuit.format.grid, rule, wide=False)
    functions = symbols.meaning(arithmetic.rounding, how.carrier)
    drawn = functions.random_bits(random << 32 - rule.bits, used_bits(how.carrier, rule.bits, rule.correction))
    return as_single(functions.round_bits(in_carrier(x, how), drawn, how, variant_of(how, rule)), how)
