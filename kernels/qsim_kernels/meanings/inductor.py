"""What the vocabulary means for elements of the loops that Inductor generates."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from qsim_kernels import arithmetic
from qsim_kernels.arithmetic import words
from qsim_kernels.carrier import SINGLE, Carrier
from qsim_kernels.lowered.elements import LoopElement
from qsim_kernels.meanings.binding import bound


@cache
def rounding(carrier: Carrier) -> SimpleNamespace:
    """The functions of `arithmetic.rounding` for elements of a carrier's bits."""
    constants = words.constants(carrier)
    dtype = torch.int32 if carrier == SINGLE else torch.int64

    def where(condition: LoopElement, chosen: Any, other: Any) -> LoopElement:
        # A number takes the dtype of the other; one of two numbers must have it already.
        return torch.where(condition, LoopElement.constant(chosen, dtype) if isinstance(chosen, int) else chosen, other)  # type: ignore[arg-type, return-value]

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
