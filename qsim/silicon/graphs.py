"""The graph of a unit: the definition of its operation, run on symbols."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

from qsim.formats import BF16, FP32, Format
from qsim.silicon.units import Unit
from qsim_kernels import arithmetic
from qsim_kernels.meanings import symbols
from qsim_kernels.meanings.expressions import Operand, word
from qsim_kernels.meanings.printing import Routine
from qsim_kernels.meanings.simplification import operation
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE, GridBits, rounding_bits, used_bits, variant_of

_WORD, _DOUBLE_WORD = (1 << 32) - 1, (1 << 64) - 1


@lru_cache(maxsize=256)
def routine(unit: Unit) -> Routine:
    """The routine that computes a unit's results, to print in any language."""
    x = word("x", unit.input.bits)
    inputs = (x, word("random", unit.random_bits)) if unit.random_bits else (x,)
    rounded = _rounded(single_bits(x, unit.source), inputs[1] if unit.random_bits else 0, unit)
    return Routine(unit.name, unit.specification, inputs, rounded, 32)


def single_bits(x: Operand, source: Format) -> Operand:
    """Float32's bits, as a word, of the value of a code."""
    if source == FP32:
        return x
    if source == BF16:
        return x << 16
    raise NotImplementedError


def _rounded(x: Operand, random: Operand, unit: Unit) -> Operand:
    """Float32's bits of a rounded number, as a word."""
    how = rounding_bits(unit.format.grid, unit.rule, wide=False)
    functions = symbols.meaning(arithmetic.rounding, how.carrier)
    drawn = functions.random_bits(random << 32 - unit.rule.bits, used_bits(how.carrier, unit.rule.bits, unit.rule.correction))
    carriers: SimpleNamespace = symbols.meaning(arithmetic.carriers, SINGLE)
    wide = how.carrier == DOUBLE
    bits = operation("signed", carriers.widened(x) if wide else x, 64 if wide else 32)
    result = functions.round_bits(bits, drawn, how, variant_of(how, unit.rule))
    return carriers.narrowed(result & _DOUBLE_WORD) if wide else result & _WORD


def grid_of(unit: Unit) -> GridBits:
    """The values of a unit's format, in the bits of the carrier in which it rounds."""
    return rounding_bits(unit.format.grid, unit.rule, wide=False)
