"""Numbers of a format in the bits of a carrier, as graphs: values of codes, and codes of values."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from qsim.formats import FP32, Float, Format
from qsim_kernels import arithmetic
from qsim_kernels.meanings import symbols
from qsim_kernels.meanings.expressions import Operand
from qsim_kernels.meanings.simplification import operation
from qsim_kernels.numbers.carrier import SINGLE, Carrier, GridBits, counts_wide, grid_bits, grid_in
from qsim_kernels.numbers.encoding import coding_bits
from qsim_kernels.numbers.grid import Grid

_WORD, _DOUBLE_WORD = (1 << 32) - 1, (1 << 64) - 1


def decoded(x: Operand, source: Format, direct: bool = True) -> Operand:
    """Float32's bits, as a word, of the value of a code; NaN is the one that `qsim.decode` gives. See `value_of`."""
    value = value_of(x, source, direct)
    if not _begins_single(source):
        return value
    functions = symbols.meaning(arithmetic.codes, SINGLE)
    return functions.where(functions.is_nan(value), SINGLE.nan, value)


def value_of(x: Operand, source: Format, direct: bool = True) -> Operand:
    """Float32's bits, as a word, of the value of a code; any NaN, because rounding and coding do not tell NaNs apart.

    Args:
        x: The code.
        source: Its format.
        direct: Whether by the direct definition, where it holds.
    """
    if _begins_single(source):
        return x << 32 - source.bits
    how = grid_bits(source.grid, wide=counts_wide(source.grid, source.coding))
    decode = symbols.value_of if direct else symbols.value_first
    return as_single(decode(x, source.grid, source.coding, how), how.carrier)


def code_of(value: Operand, fmt: Format) -> Operand:
    """The code of a value, given by float32's bits."""
    if fmt == FP32:
        return value
    how = grid_bits(fmt.grid, wide=counts_wide(fmt.grid, fmt.coding))
    return symbols.code(in_carrier(value, how.carrier), fmt.grid, fmt.coding, how)


class Meaning(NamedTuple):
    """A meaning of the arithmetic, for symbols or for Python's integers.

    Attributes:
        carrier: The carrier in whose bits numbers are given.
        functions: Gives the functions of a module of the arithmetic.
    """

    carrier: Carrier
    functions: Callable[[ModuleType], Any]

    def grid(self, grid: Grid) -> GridBits:
        """Values in the bits of the carrier, which must hold them."""
        return grid_in(self.carrier, grid)

    def value(self, code: Any, fmt: Format) -> Any:
        """The value of a code."""
        return self.functions(arithmetic.codes).value_of(code, *coding_bits(fmt.grid, fmt.coding, self.grid(fmt.grid)))

    def code(self, bits: Any, fmt: Format) -> Any:
        """The code of a value."""
        code = self.functions(arithmetic.codes).code_of(bits, *coding_bits(fmt.grid, fmt.coding, self.grid(fmt.grid)))
        return code & ((1 << fmt.bits) - 1)


class _Symbols(Meaning):
    """The meaning for symbols, which knows from what numbers have been rounded."""

    def code(self, bits: Any, fmt: Format) -> Any:
        return symbols.code(bits, fmt.grid, fmt.coding, self.grid(fmt.grid))


def for_symbols(carrier: Carrier) -> Meaning:
    """The meaning for symbols."""
    return _Symbols(carrier, lambda module: symbols.meaning(module, carrier))


def in_carrier(x: Operand, carrier: Carrier) -> Operand:
    """Float32's bits as those of a carrier, with a sign."""
    if carrier == SINGLE:
        return operation("signed", x, 32)
    return operation("signed", symbols.meaning(arithmetic.carriers, SINGLE).widened(x), 64)


def as_single(bits: Operand, carrier: Carrier) -> Operand:
    """A carrier's bits as those of a float32, as a word."""
    if carrier == SINGLE:
        return bits & _WORD
    return symbols.meaning(arithmetic.carriers, SINGLE).narrowed(bits & _DOUBLE_WORD)


def _begins_single(fmt: Format) -> bool:
    """Whether the codes of a format are the first bits of float32's."""
    return isinstance(fmt, Float) and fmt == Float(8, fmt.mantissa, specials="ieee")
