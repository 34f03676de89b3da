"""The graph of a circuit: the definition of its operation, run on symbols."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

from qsim.rounding import Rounding
from qsim.silicon import block_graphs
from qsim.silicon.blocks import BlockCircuit
from qsim.silicon.circuits import Circuit
from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.printers.routines import Routine
from qsim.silicon.sum_graphs import dot, philox
from qsim.silicon.values import as_single, code_of, decoded, in_carrier, value_of
from qsim_kernels import arithmetic
from qsim_kernels.meanings import symbols
from qsim_kernels.meanings.expressions import Operand, word
from qsim_kernels.numbers.carrier import SINGLE, rounding_bits, used_bits

#: What can be printed and synthesized.
AnyCircuit = Circuit | BlockCircuit | Dot | Philox


@lru_cache(maxsize=256)
def routine(circuit: AnyCircuit) -> Routine:
    """The routine that computes a circuit's results, to print in any language."""
    if isinstance(circuit, Dot):
        return dot(circuit)
    if isinstance(circuit, Philox):
        return philox(circuit)
    if isinstance(circuit, BlockCircuit):
        return block_graphs.scale(circuit) if circuit.operation == "scale" else block_graphs.element(circuit)
    x = word("x", circuit.input.bits)
    if circuit.operation == "decode":
        return Routine(circuit.name, circuit.specification, (x,), decoded(x, circuit.format), 32)
    value = value_of(x, circuit.source)
    random = (word("random", circuit.random_bits),) if circuit.random_bits else ()
    result = _rounded(value, circuit, *random)
    if circuit.operation == "encode":
        result = code_of(result, circuit.format)
    return Routine(circuit.name, circuit.specification, (x, *random), result, circuit.output.bits)


def defined(circuit: Circuit) -> Routine:
    """The routine of the definition that all parts of qsim share: what is coded is rounded before, and nothing is computed in one step."""
    each = routine(circuit)
    x, *random = each.inputs
    if circuit.operation == "decode":
        result = decoded(x, circuit.format, direct=False)
    else:
        how = rounding_bits(circuit.format.grid, circuit.rule, wide=False)
        value = in_carrier(value_of(x, circuit.source, direct=False), how.carrier)
        result = as_single(symbols.rounded_first(value, random[0] if random else 0, how, circuit.rule), how.carrier)
        if circuit.operation == "encode":
            result = code_of(result, circuit.format)
    return each._replace(name=f"{each.name}_defined", result=result)


def _rounded(x: Operand, circuit: Circuit, random: Operand = 0) -> Operand:
    """Float32's bits of a rounded number, as a word."""
    how = rounding_bits(circuit.format.grid, circuit.rule, wide=False)
    return as_single(symbols.rounded(in_carrier(x, how.carrier), random, how, circuit.rule), how.carrier)


def significand(kept: int, dropped: int, rounding: Rounding) -> Routine:
    """The step of the definition that rounds a significand, without exponents, signs, overflow and NaN.

    Args:
        kept: The bits that the result has, before a carry.
        dropped: The bits that are rounded away.
        rounding: How; stochastic rounding reads as many random bits.
    """
    rule = rounding.rule("saturate")
    functions = symbols.meaning(arithmetic.rounding, SINGLE)
    x: Operand = word("x", kept + dropped)
    random: tuple[Operand, ...] = (word("random", dropped),) if rule.bits else ()
    drawn = functions.random_bits(random[0] << 32 - dropped, used_bits(SINGLE, rule.bits, rule.correction)) if random else 0
    grid, variant = SimpleNamespace(parity=0), SimpleNamespace(mode=rule.mode)
    result = (x + functions.raised_by(x, x, dropped, drawn, grid, variant)) >> dropped
    comment = (f"Rounds a significand of {kept + dropped} bits to {kept}, and a carry. Rounding: {rounding}.",)
    return Routine(f"qsim_significand_{rounding.mode.name.lower()}", comment, (x, *random), result, kept + 1)
