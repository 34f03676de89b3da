"""The vocabulary for tensors: int32 for float32's bits, int64 for float64's, and int64 for words.

Conditions are masks, integers with all bits set or none: integer arithmetic is several times faster than selecting by booleans.
"""

from __future__ import annotations

import math
import operator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qsim_kernels import arithmetic
from qsim_kernels.arithmetic import words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE, Carrier, GridBits, Variant

_WORD = 0xFFFFFFFF


def _minimum(a: Any, b: Any) -> Any:
    x, bound = (a, b) if isinstance(a, Tensor) else (b, a)
    return x.clamp(max=bound) if isinstance(x, Tensor) else min(a, b)


def _maximum(a: Any, b: Any) -> Any:
    x, bound = (a, b) if isinstance(a, Tensor) else (b, a)
    return x.clamp(min=bound) if isinstance(x, Tensor) else max(a, b)


def where(mask: Any, chosen: Any, other: Any) -> Any:
    """One of two integers, selected by a mask."""
    if type(other) is int and other == 0:
        return chosen & mask
    differing = chosen ^ other
    # Temporary tensors are changed in place.
    selected = differing.bitwise_and_(mask) if isinstance(differing, Tensor) else differing & mask
    return selected.bitwise_xor_(other)


def _words(carrier: Carrier) -> dict[str, Any]:
    constants = words.constants(carrier)
    dtype, real, last = (torch.int32, torch.float32, 31) if carrier == SINGLE else (torch.int64, torch.float64, 63)

    def lt(a: Any, b: Any) -> Any:
        # Nothing here is so large that a difference overflows.
        return (a if type(b) is int and b == 0 else a - b) >> last

    def eq(a: Any, b: Any) -> Any:
        return (a == b).to(dtype).neg_() if isinstance(a, Tensor) else a == b

    def number(bits: Any) -> Any:
        return bits.view(real) if isinstance(bits, Tensor) else carrier.value(bits)

    def quotient(a: Any, b: Any) -> Tensor:
        # For division by a number, torch might multiply by its inverse.
        divisor = number(b) if isinstance(b, Tensor) else torch.full_like(a, carrier.value(b), dtype=real)
        result: Tensor = number(a) / divisor
        return result.view(dtype)

    def reaches(magnitude: Tensor, drawn: Tensor, grid: GridBits) -> Tensor:
        # By a product, because vectors have no shifts of 64 bits.
        share = magnitude.clamp(max=grid.least).view(real) * (math.ldexp(1.0, carrier.drawn) / carrier.value(grid.least))
        return -(share.to(torch.int64) + drawn >> carrier.drawn).to(dtype)

    return {
        **constants,
        "where": where,
        "minimum": _minimum,
        "maximum": _maximum,
        "is_nan": lambda bits: lt(constants["INFINITY"], bits & constants["MAGNITUDE"]),
        "is_zero": lambda bits: eq(bits & constants["MAGNITUDE"], 0),
        "to_word": lambda x: x.to(torch.int64),
        "to_int": lambda word: word.to(dtype),
        "carries": lambda a, b: -(a + b >> carrier.drawn).to(dtype),
        "to_long": lambda x: x.to(torch.int64),
        "entry": lambda table, index: table[index].to(dtype),
        "long_entry": lambda table, index: table[index],
        "unrolled": range,
        "lt": lt,
        "gt": lambda a, b: lt(b, a),
        "ge": lambda a, b: ~lt(a, b),
        "eq": eq,
        "total": lambda a, b: (number(a) + number(b)).view(dtype),
        "difference": lambda a, b: (number(a) - number(b)).view(dtype),
        "product": lambda a, b: (number(a) * number(b)).view(dtype),
        "quotient": quotient,
        "from_integer": lambda x: x.to(real).view(dtype),
        "reaches": reaches,
    }


@cache
def rounding(carrier: Carrier) -> SimpleNamespace:
    """The functions of `arithmetic.rounding` for tensors of a carrier's bits, and tables in tensors of 64 bits."""
    dtype = torch.int32 if carrier == SINGLE else torch.int64
    in_longs = bound(arithmetic.rounding, _words(DOUBLE) | words.constants(carrier)).takes_far

    def place_of(key: Tensor, table: Tensor, variant: Variant) -> Tensor:
        return torch.searchsorted(table[1 : 1 << variant.table].to(dtype), key, right=True)

    def takes_far(*given: Any) -> Tensor:
        # A mask of 64 bits.
        return in_longs(*given).to(dtype)  # type: ignore[no-any-return]

    return bound(arithmetic.rounding, _words(carrier) | {"place_of": place_of, "takes_far": takes_far})


@cache
def scales(carrier: Carrier) -> SimpleNamespace:
    """The functions of `arithmetic.scales` for tensors of a carrier's bits."""
    return bound(arithmetic.scales, _words(carrier) | {"round_bits": rounding(carrier).round_bits})


@cache
def codes(carrier: Carrier) -> SimpleNamespace:
    """The functions of `arithmetic.codes` for tensors of a carrier's bits."""
    return bound(arithmetic.codes, _words(carrier))


#: `arithmetic.hadamard.butterfly` for tensors of floats, not of their bits, of which vmap has no view before torch 2.13.
butterfly = bound(arithmetic.hadamard, {"total": operator.add, "difference": operator.sub}).butterfly

#: The functions of `arithmetic.updates` for float32 tensors, and numbers; `inner` is a function that rounds intermediates.
updates = bound(
    arithmetic.updates,
    {
        # For division by a number, torch might multiply by its inverse.
        "divide": lambda a, b: a / (b if isinstance(b, Tensor) else torch.full_like(a, b)),
        # torch's own root is not correctly rounded on a CPU; float64 is wide enough for it.
        "square_root": lambda x: x.to(torch.float64).sqrt().to(torch.float32),
        "larger": torch.maximum,
        "rounded": lambda x, inner, how: inner(x) if how.in_format else x,
    },
)


_sums = words.constants(DOUBLE) | {
    "where": torch.where,
    "minimum": _minimum,
    "maximum": _maximum,
    "bits_of": lambda x: x.view(torch.int64),
    "from_bits": lambda bits: bits.view(torch.float64),
    "round_down": torch.floor,
}
#: The functions of `arithmetic.float_sums` for float64 tensors.
float_sums = bound(arithmetic.float_sums, _sums)


def _truncated_sum(total: Any, terms: Any, unit: Tensor, adder: Any, first: int, every: int) -> Any:
    chosen = terms[first::every]
    if not chosen:  # a last step may have no term at an odd place
        return total
    up, down = float_sums.power(-unit), float_sums.power(unit)
    units: Tensor = (total * up).trunc_()
    for term in chosen:
        units += (term.value * up).trunc_()
    return units.mul_(down)


def sums(round_bits: Any) -> SimpleNamespace:
    """The functions of `arithmetic.sums` for float64 tensors, with a function that rounds their bits."""
    faster = {name: getattr(float_sums, name) for name in ("rounded_down", "exact_sum", "add_to_odd", "positive_zero", "negated")}
    return bound(arithmetic.sums, _sums | faster | {"truncated_sum": _truncated_sum, "round_bits": round_bits})


def _wide_product(a: Any, b: int) -> tuple[Any, Any]:
    if isinstance(a, int):
        return words.wide_product(a & _WORD, b)
    # Bits above the 32nd stay in both halves: they are cleared before a word is multiplied, and at the end.
    product = (a & _WORD).mul_(b) if isinstance(a, Tensor) else (a & _WORD) * b
    return product >> 32, product


_philox = bound(arithmetic.philox, {"low_word": lambda x: x & _WORD, "wide_product": _wide_product, "unrolled": range}).philox


def philox(*counter_and_key: Tensor | int) -> tuple[Tensor, ...]:
    """`arithmetic.philox.philox` for tensors of words; numbers stand for words that are the same everywhere."""
    return tuple(word & _WORD for word in _philox(*counter_and_key))


#: The functions of `arithmetic.mixing` for int64 tensors; words are cleared in place, because all are temporary.
mixing = bound(arithmetic.mixing, {"low_word": lambda x: x.bitwise_and_(_WORD)})
