"""The vocabulary for symbols: running the definition on them gives its graph of operations, from which `c` and others print code."""

from __future__ import annotations

from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace

from qsim_kernels.arithmetic import words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.meanings.simplification import operation
from qsim_kernels.numbers.carrier import Carrier


@cache
def meaning(module: ModuleType, carrier: Carrier) -> SimpleNamespace:
    """The functions of a module of the arithmetic for symbols, with the constants of a carrier."""
    constants = words.constants(carrier)
    vocabulary = {
        # Those that are written with operators work on symbols, too.
        **{name: word for name, word in vars(words).items() if isinstance(word, FunctionType)},
        **constants,
        "where": lambda condition, chosen, other: operation("where", condition, chosen, other),
        "minimum": lambda a, b: operation("min", a, b),
        "maximum": lambda a, b: operation("max", a, b),
        "is_nan": lambda bits: operation("<", constants["INFINITY"], bits & constants["MAGNITUDE"]),
        "carries": lambda a, b: operation("<", constants["DRAWN"], a + b),
    }
    return bound(module, vocabulary)
