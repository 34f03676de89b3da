"""The vocabulary for elements of the loops that Inductor generates."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch

from qsim_kernels import arithmetic
from qsim_kernels.arithmetic import words
from qsim_kernels.lowered.elements import LoopElement, where as select
from qsim_kernels.meanings.binding import bound
from qsim_kernels.numbers.carrier import SINGLE, Carrier


@cache
def rounding(carrier: Carrier) -> SimpleNamespace:
    """The functions of `arithmetic.rounding` for elements of a carrier's bits."""
    constants = words.constants(carrier)
    dtype = torch.int32 if carrier == SINGLE else torch.int64

    def where(condition: LoopElement, chosen: LoopElement | int, other: LoopElement | int) -> LoopElement:
        # A number takes the dtype of the other; one of two numbers must have it already.
        return select(condition, LoopElement.constant(chosen, dtype) if isinstance(chosen, int) else chosen, other)

    return bound(
        arithmetic.rounding,
        {
            **constants,
            "where": where,
            "minimum": lambda a, b: a.clamp(max=b),
            "maximum": lambda a, b: a.clamp(min=b),
            "is_nan": lambda bits: bits & constants["MAGNITUDE"] > constants["INFINITY"],
        },
    )
