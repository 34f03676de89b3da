"""The vocabulary for elements of the loops that Inductor generates."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from qsim_kernels import arithmetic
from qsim_kernels.arithmetic import words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.meanings.loop_elements import LoopElement, where as select
from qsim_kernels.numbers.carrier import SINGLE, Carrier


@cache
def rounding(carrier: Carrier) -> SimpleNamespace:
    """The functions of `arithmetic.rounding` for elements of a carrier's bits."""
    return bound(arithmetic.rounding, _words(carrier))


@cache
def scales(carrier: Carrier) -> SimpleNamespace:
    """The functions of `arithmetic.scales` for elements of a carrier's bits."""
    return bound(arithmetic.scales, _words(carrier) | {"round_bits": rounding(carrier).round_bits})


def _words(carrier: Carrier) -> dict[str, Any]:
    constants = words.constants(carrier)
    dtype, real = (torch.int32, torch.float32) if carrier == SINGLE else (torch.int64, torch.float64)

    def where(condition: LoopElement, chosen: LoopElement | int, other: LoopElement | int) -> LoopElement:
        # A number takes the dtype of the other; one of two numbers must have it already.
        return select(condition, LoopElement.constant(chosen, dtype) if isinstance(chosen, int) else chosen, other)

    def number(bits: LoopElement | int, dtype: torch.dtype = real) -> LoopElement:
        return LoopElement.constant(carrier.value(bits), dtype) if isinstance(bits, int) else bits.view(real).to(dtype)

    def quotient(a: LoopElement | int, b: LoopElement | int) -> LoopElement:
        # Compilers divide float32 numbers approximately; float64 has more than twice as many bits, so that rounding again is the same.
        return (number(a, torch.float64) / number(b, torch.float64)).to(real).view(dtype)

    return {
        **constants,
        "where": where,
        "minimum": lambda a, b: a.clamp(max=b),
        "maximum": lambda a, b: a.clamp(min=b),
        "is_nan": lambda bits: bits & constants["MAGNITUDE"] > constants["INFINITY"],
        "is_zero": lambda bits: bits & constants["MAGNITUDE"] == 0,
        "product": lambda a, b: (number(a) * number(b)).view(dtype),
        "quotient": quotient,
    }
