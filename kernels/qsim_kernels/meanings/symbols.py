"""The vocabulary for symbols: running the definition on them gives its graph of operations, from which `c` and others print code."""

from __future__ import annotations

from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import NamedTuple

from qsim_kernels import arithmetic
from qsim_kernels.arithmetic import words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.meanings.expressions import Operand, Symbol, known, named
from qsim_kernels.meanings.simplification import assuming, operation
from qsim_kernels.numbers.carrier import Carrier, GridBits, used_bits, variant_of
from qsim_kernels.numbers.direct import direct_numbers, direct_rounding
from qsim_kernels.numbers.direct_values import direct_values
from qsim_kernels.numbers.encoding import Encoding, coding_bits
from qsim_kernels.numbers.grid import Coding, Grid, Rule


def where(condition: Operand, chosen: Operand, other: Operand) -> Operand:
    """One of two integers."""
    return operation("where", condition, chosen, other)


@cache
def meaning(module: ModuleType, carrier: Carrier, names: bool = True) -> SimpleNamespace:
    """The functions of a module of the arithmetic for symbols.

    Args:
        module: The module.
        carrier: The carrier that gives the constants.
        names: Whether variables of direct definitions keep their names, which rules do not look through.
    """
    constants = words.constants(carrier)
    vocabulary = {
        # Those that are written with operators work on symbols, too.
        **{name: word for name, word in vars(words).items() if isinstance(word, FunctionType)},
        **constants,
        "where": where,
        "assuming": assuming,
        "minimum": lambda a, b: operation("min", a, b),
        "maximum": lambda a, b: operation("max", a, b),
        "is_nan": lambda bits: operation("<", constants["INFINITY"], bits & constants["MAGNITUDE"]),
        "is_zero": lambda bits: operation("==", bits & constants["MAGNITUDE"], 0),
        "carries": lambda a, b: operation("<", constants["DRAWN"], a + b),
        "bit_length": bit_length,
    }
    if module in (arithmetic.direct, arithmetic.direct_values):
        vocabulary |= {"named": named} if names else {}
    if module is arithmetic.codes:
        # Integers are multiplied by powers of two.
        vocabulary |= {"from_integer": lambda x: x, "product": lambda x, power: number_of(x, exponent_of(power, carrier), carrier)}
    if module is arithmetic.scales:
        sums = meaning(arithmetic.sums, carrier)
        vocabulary |= {
            "round_bits": meaning(arithmetic.rounding, carrier).round_bits,
            "product": lambda x, y: sums.multiply_to_odd(x, y, 0, 0),
        }
        vocabulary["quotient"] = lambda x, y: quotient(x, y, carrier)
    if module is arithmetic.sums:
        vocabulary["round_bits"] = lambda bits, drawn, grid, rule: rounded(
            bits, drawn >> carrier.drawn - rule.bits, grid, rule, names=False
        )
        vocabulary |= {
            "number_of": lambda count, unit: number_of(count, unit, carrier),
            "number_to_odd": lambda count, unit: number_of(count, unit, carrier, sticky=True),
            # Numbers are normal or zero, which has no bits to place.
            "place_of": lambda bits: ((bits & carrier.nan) >> carrier.mantissa) - (carrier.bias + carrier.mantissa),
        }
    return bound(module, vocabulary)


class Origin(NamedTuple):
    """The number that was rounded, the random integer, the values to choose from, and how to choose."""

    bits: Operand
    random: Operand
    how: GridBits
    rule: Rule


def rounded(bits: Operand, random: Operand, how: GridBits, rule: Rule, names: bool = True) -> Operand:
    """The bits of a rounded number, as a signed integer: by the direct definition, where it holds.

    Args:
        bits: The number's bits in a carrier, as a signed integer.
        random: As many random bits as stochastic rounding reads.
        how: The values to choose from, in the carrier's bits.
        rule: How to choose.
        names: Whether the definition's variables keep their names.
    """
    carrier, direct = how.carrier, direct_rounding(how, rule)
    if direct is None:
        return rounded_first(bits, random, how, rule)
    definition = meaning(arithmetic.direct, carrier, names)
    result = operation("signed", definition.bits_of_rounded(word_of(bits, carrier), random, *direct), carrier.nan.bit_length() + 1)
    if isinstance(result, Symbol):
        result.origin = Origin(bits, random, how, rule)
    return result


def rounded_first(bits: Operand, random: Operand, how: GridBits, rule: Rule) -> Operand:
    """`rounded` by the definition that kernels have."""
    rounding = meaning(arithmetic.rounding, how.carrier)
    drawn = rounding.random_bits(random << 32 - rule.bits, used_bits(how.carrier, rule.bits, rule.correction)) if rule.bits else 0
    return rounding.round_bits(bits, drawn, how, variant_of(how, rule))


def code(bits: Operand, grid: Grid, coding: Coding, how: GridBits) -> Operand:
    """The code of a value: of a rounded number in one step, where the direct definition holds.

    Args:
        bits: The bits of a value of the grid, as a signed integer.
        grid: The values.
        coding: Their codes.
        how: The values in the carrier's bits.
    """
    origin = bits.origin if isinstance(bits, Symbol) else None
    direct = direct_numbers(Encoding(grid, origin.rule, coding), how) if origin is not None and origin.how == how else None
    if origin is None or direct is None:
        return meaning(arithmetic.codes, how.carrier).code_of(bits, *coding_bits(grid, coding, how)) & ((1 << coding.bits) - 1)
    return meaning(arithmetic.direct, how.carrier).code_of_rounded(word_of(origin.bits, how.carrier), origin.random, *direct)


def word_of(bits: Operand, carrier: Carrier) -> Operand:
    """A carrier's bits without a sign."""
    return bits & ((1 << carrier.nan.bit_length() + 1) - 1)


def value_of(code: Operand, grid: Grid, coding: Coding, how: GridBits) -> Operand:
    """The bits of the value of a code, as a signed integer: by the direct definition, where it holds.

    Args:
        code: The code.
        grid: The values.
        coding: Their codes.
        how: The values in the carrier's bits.
    """
    direct = direct_values(grid, coding, how)
    if direct is None:
        return value_first(code, grid, coding, how)
    word = meaning(arithmetic.direct_values, how.carrier).bits_of_code(code, *direct)
    return operation("signed", word, how.carrier.nan.bit_length() + 1)


def value_first(code: Operand, grid: Grid, coding: Coding, how: GridBits) -> Operand:
    """`value_of` by the definition that kernels have."""
    return meaning(arithmetic.codes, how.carrier).value_of(code, *coding_bits(grid, coding, how))


def bit_length(x: Operand) -> Operand:
    """The number of bits of an integer that is not negative, without leading zeros."""
    width = known(x).high.bit_length()
    rest, length = x & ((1 << width) - 1), 0
    for shift in (1 << k for k in reversed(range((max(width, 1) - 1).bit_length()))):
        is_long = operation("<", (1 << shift) - 1, rest)
        rest, length = where(is_long, rest >> shift, rest & ((1 << shift) - 1)), length + where(is_long, shift, 0)
    return length + rest


def number_of(x: Operand, unit: Operand, carrier: Carrier, sticky: bool = False) -> Operand:
    """The bits of an integer times two to the power of `unit`: its first one is shifted to its place.

    Args:
        x: The integer, which the carrier holds exactly, or is rounded to odd.
        unit: The exponent.
        carrier: The carrier.
        sticky: Whether to round.
    """
    magnitude = where(x < 0, 0 - x, x)
    width = max(known(magnitude).width, carrier.mantissa + 1)
    field, shifted = unit + (carrier.bias + width - 1), magnitude
    for shift in (1 << k for k in reversed(range((width - 1).bit_length()))):
        if shift < width:
            is_short = shifted < 1 << width - shift
            shifted = where(is_short, (shifted & ((1 << width - shift) - 1)) << shift, shifted)
            field = field - where(is_short, shift, 0)
    below = width - 1 - carrier.mantissa
    mantissa = (shifted >> below) & ((1 << carrier.mantissa) - 1)
    if sticky:
        mantissa = mantissa | ((shifted & ((1 << below) - 1)) > 0)
    # No number has another field; those of operands without an exponent are not used.
    field = field & (carrier.infinity >> carrier.mantissa)
    bits = where(magnitude == 0, 0, field << carrier.mantissa | mantissa)
    return where(x < 0, bits | carrier.sign, bits)


def exponent_of(power: int, carrier: Carrier) -> int:
    """The exponent of a power of two in a carrier's bits."""
    if power & ((1 << carrier.mantissa) - 1) or power <= 0:
        raise ValueError(f"symbols are multiplied by powers of two, got the bits {power:#x}")
    return (power >> carrier.mantissa) - carrier.bias


def quotient(x: Operand, y: Operand, carrier: Carrier) -> Operand:
    """A number divided by a positive one, or by NaN: rounded to odd."""
    sums = meaning(arithmetic.sums, carrier)
    bits = carrier.mantissa + 2
    count, divisor = sums.normal_significand(x) << bits, sums.normal_significand(y)
    odd = count // divisor << 1 | (count % divisor > 0)
    finite = sums.number_to_odd(odd, sums.place_of(x) - sums.place_of(y) - bits - 1) | (x & carrier.sign)
    is_kept = sums.is_zero(x) | (sums.is_finite(x) ^ 1)
    return where(sums.is_nan(y), carrier.nan, where(is_kept, x, finite))
