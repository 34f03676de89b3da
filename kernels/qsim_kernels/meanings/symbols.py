"""The vocabulary for symbols: running the definition on them gives its graph of operations, from which `c` and others print code."""

from __future__ import annotations

from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace

from qsim_kernels.arithmetic import words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.meanings.expressions import Operand, known
from qsim_kernels.meanings.simplification import operation
from qsim_kernels.numbers.carrier import Carrier


def where(condition: Operand, chosen: Operand, other: Operand) -> Operand:
    """One of two integers."""
    return operation("where", condition, chosen, other)


@cache
def meaning(module: ModuleType, carrier: Carrier) -> SimpleNamespace:
    """The functions of a module of the arithmetic for symbols, with the constants of a carrier."""
    constants = words.constants(carrier)
    vocabulary = {
        # Those that are written with operators work on symbols, too.
        **{name: word for name, word in vars(words).items() if isinstance(word, FunctionType)},
        **constants,
        "where": where,
        "minimum": lambda a, b: operation("min", a, b),
        "maximum": lambda a, b: operation("max", a, b),
        "is_nan": lambda bits: operation("<", constants["INFINITY"], bits & constants["MAGNITUDE"]),
        "carries": lambda a, b: operation("<", constants["DRAWN"], a + b),
        "from_integer": lambda x: from_integer(x, carrier),
        "product": lambda bits, power: product(bits, power, carrier),
    }
    return bound(module, vocabulary)


def from_integer(x: Operand, carrier: Carrier) -> Operand:
    """The bits of an integer that a carrier holds exactly: it is shifted until its first one is where significands have it."""
    magnitude = where(x < 0, 0 - x, x)
    width = max(known(magnitude).width, carrier.mantissa + 1)
    field, shifted = carrier.bias + width - 1, magnitude
    for shift in (1 << k for k in reversed(range((width - 1).bit_length()))):
        if shift < width:
            is_short = shifted < 1 << width - shift
            shifted = where(is_short, shifted << shift, shifted)
            field = field - where(is_short, shift, 0)
    mantissa = (shifted >> width - 1 - carrier.mantissa) & ((1 << carrier.mantissa) - 1)
    bits = where(magnitude == 0, 0, field << carrier.mantissa | mantissa)
    return where(x < 0, bits | carrier.sign, bits)


def product(bits: Operand, power: int, carrier: Carrier) -> Operand:
    """A number times a power of two, if neither it nor the result is subnormal: the sum of their exponents."""
    if power & ((1 << carrier.mantissa) - 1) or power <= 0:
        raise ValueError(f"symbols are multiplied by powers of two, got the bits {power:#x}")
    magnitude = bits & carrier.nan
    return where(magnitude == 0, 0, magnitude + (power - (carrier.bias << carrier.mantissa))) | (bits & carrier.sign)
