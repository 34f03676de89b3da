"""The graph of a circuit: the definition of its operation, run on symbols."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

from qsim.formats import Float, Format
from qsim.rounding import Rounding
from qsim.silicon.circuits import Circuit
from qsim_kernels import arithmetic
from qsim_kernels.meanings import symbols
from qsim_kernels.meanings.expressions import Operand, word
from qsim_kernels.meanings.printing import Routine
from qsim_kernels.meanings.simplification import operation
from qsim_kernels.numbers.carrier import SINGLE, GridBits, counts_wide, grid_bits, is_flat, rounding_bits, used_bits, variant_of
from qsim_kernels.numbers.encoding import coding_bits

_WORD, _DOUBLE_WORD = (1 << 32) - 1, (1 << 64) - 1


@lru_cache(maxsize=256)
def routine(circuit: Circuit) -> Routine:
    """The routine that computes a circuit's results, to print in any language."""
    x = word("x", circuit.input.bits)
    if circuit.operation == "decode":
        return Routine(circuit.name, circuit.specification, (x,), value_of(x, circuit.format), 32)
    value = x << 32 - circuit.source.bits if _begins_single(circuit.source) else value_of(x, circuit.source)
    random = (word("random", circuit.random_bits),) if circuit.random_bits else ()
    rounded = _rounded(value, circuit, *random)
    if circuit.operation == "encode":
        rounded = code(rounded, circuit)
    return Routine(circuit.name, circuit.specification, (x, *random), rounded, circuit.output.bits)


def _begins_single(fmt: Format) -> bool:
    """Whether the codes of a format are the first bits of float32's."""
    return isinstance(fmt, Float) and fmt == Float(8, fmt.mantissa, specials="ieee")


def value_of(x: Operand, source: Format) -> Operand:
    """Float32's bits, as a word, of the value of a code."""
    how = grid_bits(source.grid, wide=counts_wide(source.grid, source.coding))
    numbers, variant = coding_bits(source.grid, source.coding, how)
    if is_flat(source.grid) and how.carrier == SINGLE and not source.coding.twos_complement:
        # Its values are spaced like float32's own, down to zero.
        variant = variant._replace(zero=False, subnormals=False)
    value = symbols.meaning(arithmetic.codes, how.carrier).value_of(x, numbers, variant)
    return _as_single(value, how)


def code(value: Operand, circuit: Circuit) -> Operand:
    """The code of a value, given by float32's bits."""
    grid, coding = circuit.format.grid, circuit.format.coding
    how = grid_bits(grid, wide=counts_wide(grid, coding))
    result = symbols.meaning(arithmetic.codes, how.carrier).code_of(_in_carrier(value, how), *coding_bits(grid, coding, how))
    return result & ((1 << coding.bits) - 1)


def _rounded(x: Operand, circuit: Circuit, random: Operand = 0) -> Operand:
    """Float32's bits of a rounded number, as a word."""
    rule = circuit.rule
    how = rounding_bits(circuit.format.grid, rule, wide=False)
    functions = symbols.meaning(arithmetic.rounding, how.carrier)
    drawn = functions.random_bits(random << 32 - rule.bits, used_bits(how.carrier, rule.bits, rule.correction))
    return _as_single(functions.round_bits(_in_carrier(x, how), drawn, how, variant_of(how, rule)), how)


def _in_carrier(x: Operand, how: GridBits) -> Operand:
    """Float32's bits as those of a carrier, with a sign."""
    if how.carrier == SINGLE:
        return operation("signed", x, 32)
    return operation("signed", symbols.meaning(arithmetic.carriers, SINGLE).widened(x), 64)


def _as_single(bits: Operand, how: GridBits) -> Operand:
    """A carrier's bits as those of a float32, as a word."""
    if how.carrier == SINGLE:
        return bits & _WORD
    return symbols.meaning(arithmetic.carriers, SINGLE).narrowed(bits & _DOUBLE_WORD)


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
