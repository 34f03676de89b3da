"""Numbers of a format in the bits of a carrier, as graphs: values of codes, and codes of values."""

from __future__ import annotations

from qsim.formats import FP32, Float, Format
from qsim_kernels import arithmetic
from qsim_kernels.meanings import symbols
from qsim_kernels.meanings.expressions import Operand
from qsim_kernels.meanings.simplification import operation
from qsim_kernels.numbers.carrier import SINGLE, GridBits, counts_wide, grid_bits, is_flat
from qsim_kernels.numbers.encoding import coding_bits

_WORD, _DOUBLE_WORD = (1 << 32) - 1, (1 << 64) - 1


def value_of(x: Operand, source: Format) -> Operand:
    """Float32's bits, as a word, of the value of a code."""
    if _begins_single(source):
        return x << 32 - source.bits
    how = grid_bits(source.grid, wide=counts_wide(source.grid, source.coding))
    numbers, variant = coding_bits(source.grid, source.coding, how)
    if is_flat(source.grid) and how.carrier == SINGLE and not source.coding.twos_complement:
        # Its values are spaced like float32's own, down to zero.
        variant = variant._replace(zero=False, subnormals=False)
    value = symbols.meaning(arithmetic.codes, how.carrier).value_of(x, numbers, variant)
    return as_single(value, how)


def code_of(value: Operand, fmt: Format) -> Operand:
    """The code of a value, given by float32's bits."""
    grid, coding = fmt.grid, fmt.coding
    if fmt == FP32:
        return value
    how = grid_bits(grid, wide=counts_wide(grid, coding))
    result = symbols.meaning(arithmetic.codes, how.carrier).code_of(in_carrier(value, how), *coding_bits(grid, coding, how))
    return result & ((1 << coding.bits) - 1)


def in_carrier(x: Operand, how: GridBits) -> Operand:
    """Float32's bits as those of a carrier, with a sign."""
    if how.carrier == SINGLE:
        return operation("signed", x, 32)
    return operation("signed", symbols.meaning(arithmetic.carriers, SINGLE).widened(x), 64)


def as_single(bits: Operand, how: GridBits) -> Operand:
    """A carrier's bits as those of a float32, as a word."""
    if how.carrier == SINGLE:
        return bits & _WORD
    return symbols.meaning(arithmetic.carriers, SINGLE).narrowed(bits & _DOUBLE_WORD)


def _begins_single(fmt: Format) -> bool:
    """Whether the codes of a format are the first bits of float32's."""
    return isinstance(fmt, Float) and fmt == Float(8, fmt.mantissa, specials="ieee")
