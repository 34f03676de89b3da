"""The graphs of block formats: the definitions of scales and of elements under them, run on symbols."""

from __future__ import annotations

from functools import reduce
from typing import Any

from qsim.formats import FP32, Format
from qsim.silicon.blocks import BlockCircuit
from qsim.silicon.printers.routines import Routine
from qsim.silicon.values import for_symbols
from qsim_kernels import arithmetic
from qsim_kernels.meanings import symbols
from qsim_kernels.meanings.expressions import Operand, word
from qsim_kernels.meanings.simplification import operation
from qsim_kernels.numbers.carrier import Carrier, grid_in
from qsim_kernels.numbers.scales import scale_numbers, variant_of_scales
from qsim_kernels.numbers.sums import SINGLE_GRID, TO_SINGLE

#: Two bits more than float32's, so that quotients and products that are rounded to odd are rounded to float32 as if they were exact; the
#: exponents of products of any two numbers and of their inverses. Quotients that become scales have few bits, at whose midpoints no
#: quotient of float32 numbers is without being equal, so that rounding them to float64 first, as qsim does, makes no difference.
_CARRIER = Carrier(26, 511)


def scale(circuit: BlockCircuit) -> Routine:
    """The routine that computes the scale of a block."""
    meaning, source, making = for_symbols(_CARRIER), circuit.source, circuit.scales
    x = tuple(word(f"x[{k}]", source.bits) for k in range(circuit.format.size))
    scales = meaning.functions(arithmetic.scales)
    largest = meaning.value(reduce(lambda a, b: operation("max", a, b), (y & (1 << source.bits - 1) - 1 for y in x)), source)
    whole = (word("whole", 32),) if circuit.has_whole else ()
    if whole:
        largest = scales.quotient(largest, _single(whole[0]))
    bits = scales.scale_of(largest, 0, scale_numbers(making, _CARRIER), making.rule, variant_of_scales(making.rule))
    return Routine(circuit.name, circuit.specification, (*x, *whole), meaning.code(bits, circuit.output), circuit.output.bits)


def element(circuit: BlockCircuit) -> Routine:
    """The routine that computes the code of an element under a scale."""
    meaning, rule = for_symbols(_CARRIER), circuit.rule
    x, code = word("x", circuit.source.bits), word("scale", circuit.format.scale.bits)
    whole = (word("whole", 32),) if circuit.has_whole else ()
    random: tuple[Operand, ...] = (word("random", rule.bits),) if rule.bits else ()
    number, factor = _value(x, circuit.source), _value(code, circuit.format.scale)
    quotient = _divided(number, factor, circuit, *whole)
    fmt = circuit.output
    rounded = symbols.rounded(quotient, random[0] if random else 0, grid_in(_CARRIER, fmt.grid), rule)
    return Routine(circuit.name, circuit.specification, (x, code, *whole, *random), meaning.code(rounded, fmt), fmt.bits)


def _divided(x: Operand, factor: Operand, circuit: BlockCircuit, whole: Operand = None) -> Operand:
    """An element divided by its scale: exactly by a power of two, otherwise times its inverse, with float32's roundings."""
    scales = symbols.meaning(arithmetic.scales, _CARRIER)
    nan, one = _CARRIER.nan, _CARRIER.bias << _CARRIER.mantissa
    if whole is None and circuit.format.scale.grid.mantissa == 0:
        magnitude = x & nan
        is_kept = operation("|", magnitude == 0, operation("<=", _CARRIER.infinity, magnitude))
        exact = symbols.where(is_kept, x, magnitude + (one - (factor & nan)) | x & _CARRIER.sign)
        return symbols.where(scales.is_nan(factor), nan, exact)
    if whole is not None:
        product = _rounded(scales.product(factor, _single(whole)))
        factor = symbols.where(product == _CARRIER.infinity, grid_in(_CARRIER, SINGLE_GRID).top, product)
    quotient = _rounded(scales.product(x, _rounded(scales.inverse(factor))))
    return scales.kept_from_zero(quotient, x) if circuit.rule.leaves_zero else quotient


def _value(code: Operand, fmt: Format) -> Operand:
    """The value of a code."""
    return symbols.value_of(code, fmt.grid, fmt.coding, grid_in(_CARRIER, fmt.grid))


def _single(bits: Operand) -> Any:
    """A float32 number, given by its bits."""
    return for_symbols(_CARRIER).value(bits, FP32)


def _rounded(x: Operand) -> Operand:
    """A number rounded to float32."""
    return symbols.rounded(x, 0, grid_in(_CARRIER, SINGLE_GRID), TO_SINGLE)
