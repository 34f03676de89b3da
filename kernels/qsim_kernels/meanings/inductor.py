"""The vocabulary for elements of the loops that Inductor generates, and such an element, with the methods of a tensor that rounding uses.

Called with elements in place of tensors, a function that rounds writes such a loop. Dtypes follow torch's rules: two elements are converted
to a common dtype, and a number takes the dtype of the element that it meets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from qsim_kernels import arithmetic
from qsim_kernels.arithmetic import words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.numbers.carrier import SINGLE, Carrier
from qsim_kernels.private import inductor_operations as ops


def _binary(name: str, result: torch.dtype | None = None) -> Callable[[LoopElement, LoopElement | float], LoopElement]:
    """One of Inductor's operators as a method; the dtype of its result is the operands' by default."""

    def method(self: LoopElement, other: LoopElement | float) -> LoopElement:
        dtype = _common(self, other)
        return LoopElement(getattr(ops, name)(self.to(dtype).value, _as(other, dtype).value), result or dtype)

    return method


def _in_place(method: Callable[..., LoopElement]) -> Callable[..., LoopElement]:
    """A method that changes its element."""

    def changing(self: LoopElement, *given: Any, **options: Any) -> LoopElement:
        self.value = method(self, *given, **options).value
        return self

    return changing


class LoopElement:
    """An element in a loop.

    Args:
        value: Inductor's value.
        dtype: The dtype of the tensor.
        device: Its device; `None` for what is computed.
    """

    def __init__(self, value: Any, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self.value, self.dtype, self.device = value, dtype, device

    @classmethod
    def constant(cls, number: float, dtype: torch.dtype) -> LoopElement:
        """A number as an element; an integer's dtype takes no fraction, with which torch would compute in floats."""
        if not dtype.is_floating_point and number != int(number):
            raise TypeError(f"{number} is not a number of {dtype}")
        return cls(ops.constant(float(number) if dtype.is_floating_point else int(number), dtype), dtype)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        """The functions of torch that rounding calls; torch raises an error for any other."""
        return _FUNCTIONS[function](*args) if function in _FUNCTIONS else NotImplemented

    def to(self, dtype: torch.dtype) -> LoopElement:
        """Convert the element."""
        return self if dtype == self.dtype else LoopElement(ops.to_dtype(self.value, dtype, src_dtype=self.dtype), dtype)

    def view(self, dtype: torch.dtype) -> LoopElement:
        """Read the element's bits as another dtype."""
        return self if dtype == self.dtype else LoopElement(ops.to_dtype_bitcast(self.value, dtype, self.dtype), dtype)

    def clamp(self, min: float | None = None, max: float | None = None) -> LoopElement:
        """Limit the element to a range; NaN stays."""
        least = self if min is None else self._maximum(min)
        return least if max is None else least._minimum(max)

    def masked_fill(self, mask: LoopElement, number: float) -> LoopElement:
        """Take a number where the mask is true."""
        return select(mask, number, self)

    def isnan(self) -> LoopElement:
        """Whether the element is NaN."""
        return LoopElement(ops.isnan(self.value), torch.bool)

    def abs(self) -> LoopElement:
        """The magnitude."""
        return LoopElement(ops.abs(self.value), self.dtype)

    def isfinite(self) -> LoopElement:
        """Whether the element is neither infinite nor NaN."""
        return self.abs() < math.inf

    def reciprocal(self) -> LoopElement:
        """Divide one by the element."""
        return LoopElement(ops.reciprocal(self.value), self.dtype)

    def __invert__(self) -> LoopElement:
        return LoopElement((ops.logical_not if self.dtype == torch.bool else ops.bitwise_not)(self.value), self.dtype)

    def __neg__(self) -> LoopElement:
        return LoopElement(ops.neg(self.value), self.dtype)

    def __rsub__(self, other: float) -> LoopElement:
        return LoopElement.constant(other, self.dtype) - self

    def __rlshift__(self, other: float) -> LoopElement:
        return LoopElement.constant(other, self.dtype) << self

    __hash__ = None  # type: ignore[assignment]
    __lt__, __le__, __gt__, __ge__, __eq__ = (_binary(name, torch.bool) for name in ("lt", "le", "gt", "ge", "eq"))  # type: ignore[assignment]
    add = __add__ = __radd__ = _binary("add")
    sub = __sub__ = _binary("sub")
    __mul__ = __rmul__ = _binary("mul")
    __truediv__ = _binary("truediv")
    bitwise_and = __and__ = __rand__ = _binary("bitwise_and")
    __or__ = __ror__ = _binary("bitwise_or")
    bitwise_xor = __xor__ = __rxor__ = _binary("bitwise_xor")
    __lshift__ = _binary("bitwise_left_shift")
    bitwise_right_shift = __rshift__ = _binary("bitwise_right_shift")
    _maximum, _minimum = _binary("maximum"), _binary("minimum")
    add_, sub_, clamp_ = _in_place(add), _in_place(sub), _in_place(clamp)
    bitwise_xor_ = _in_place(bitwise_xor)


def by_ptx(text: str, *given: LoopElement) -> LoopElement:
    """The result of a text in NVIDIA's PTX for elements, all of them 64-bit integers."""
    # Indices may have 32 bits in the code that Inductor writes, whatever their dtype.
    values = [ops.to_dtype(x.value, torch.int64) for x in given]
    constraints = ",".join(["=l", *("l" for _ in given)])
    return LoopElement(ops.inline_asm_elementwise(*values, asm=text, constraints=constraints, dtype=torch.int64), torch.int64)


def select(mask: LoopElement, one: LoopElement | float, other: LoopElement | float) -> LoopElement:
    """`torch.where`."""
    dtype = _common(one, other)
    return LoopElement(ops.where(mask.value, _as(one, dtype).value, _as(other, dtype).value), dtype)


def _common(one: LoopElement | float, other: LoopElement | float) -> torch.dtype:
    """The dtype of two elements or numbers; that of two numbers is int64."""
    dtypes = [x.dtype for x in (one, other) if isinstance(x, LoopElement)] or [torch.int64]
    return torch.promote_types(dtypes[0], dtypes[-1])


def _as(x: LoopElement | float, dtype: torch.dtype) -> LoopElement:
    """An element or a number as an element of a dtype."""
    return x.to(dtype) if isinstance(x, LoopElement) else LoopElement.constant(x, dtype)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., LoopElement]] = {
    torch.where: select,
}


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
        "to_word": lambda x: x.to(torch.int64),
        "to_int": lambda word: word.to(dtype),
        "carries": lambda a, b: a + b > constants["DRAWN"],
        "is_nan": lambda bits: bits & constants["MAGNITUDE"] > constants["INFINITY"],
        "is_zero": lambda bits: bits & constants["MAGNITUDE"] == 0,
        "product": lambda a, b: (number(a) * number(b)).view(dtype),
        "quotient": quotient,
    }
