"""The vocabulary for Python's integers, in the bits of either carrier: slow, and closest to the text of the definition."""

from __future__ import annotations

from functools import cache
from types import ModuleType, SimpleNamespace

from qsim_kernels import arithmetic
from qsim_kernels.arithmetic import words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.numbers.carrier import Carrier


@cache
def functions(module: ModuleType, carrier: Carrier) -> SimpleNamespace:
    """The functions of a module of the arithmetic for a carrier's bits."""
    vocabulary = vars(bound(words, words.constants(carrier) | words.operations(carrier)))
    vocabulary = {name: given for name, given in vocabulary.items() if not name.startswith("_")}
    if module is arithmetic.scales:
        vocabulary["round_bits"] = functions(arithmetic.rounding, carrier).round_bits
    return bound(module, vocabulary | {"philox": arithmetic.philox.philox})
