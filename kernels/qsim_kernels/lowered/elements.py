"""An element of a tensor in the loops that Inductor generates, with the methods of a tensor that rounding uses.

Functions that round tensors write these loops when they are called with elements, so that a rounding is one node of a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def _operator(name: str, dtype: torch.dtype | None = None) -> Callable[[Element, Element | float], Element]:
    """An operator of two elements; the dtype of its result is theirs by default."""

    def method(self: Element, other: Element | float) -> Element:
        return self.apply(name, other, dtype=dtype)

    return method


def _in_place(method: Callable[..., Element]) -> Callable[..., Element]:
    """A method that changes its element."""

    def changing(self: Element, *given: Any, **options: Any) -> Element:
        self.value = method(self, *given, **options).value
        return self

    return changing


class Element:
    """An element in a loop.

    Args:
        value: Inductor's value.
        dtype: The dtype of the tensor.
    """

    def __init__(self, value: Any, dtype: torch.dtype) -> None:
        self.value, self.dtype = value, dtype

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Element:
        """The functions of torch that rounding calls."""
        return _FUNCTIONS[function](*args)

    def apply(self, name: str, *others: Element | float, dtype: torch.dtype | None = None) -> Element:
        """One of Inductor's operators, on elements and numbers of one dtype."""
        from torch._inductor.virtualized import ops  # imports sympy

        one: Element = self
        for other in others:
            one = one.to(torch.promote_types(one.dtype, other.dtype)) if isinstance(other, Element) else one
        values = (one.like(other).to(one.dtype).value for other in others)
        return Element(getattr(ops, name)(one.value, *values), dtype or one.dtype)

    def like(self, other: Element | float) -> Element:
        """An element, or a number as one of this dtype."""
        return other if isinstance(other, Element) else constant(other, self.dtype)

    def to(self, dtype: torch.dtype) -> Element:
        """The element, converted."""
        from torch._inductor.virtualized import ops  # imports sympy

        return self if dtype == self.dtype else Element(ops.to_dtype(self.value, dtype, src_dtype=self.dtype), dtype)

    def view(self, dtype: torch.dtype) -> Element:
        """Its bits, read as another dtype."""
        from torch._inductor.virtualized import ops  # imports sympy

        return self if dtype == self.dtype else Element(ops.to_dtype_bitcast(self.value, dtype, self.dtype), dtype)

    def clamp(self, min: float | None = None, max: float | None = None) -> Element:
        """The element between two numbers; NaN stays."""
        least = self if min is None else self.apply("maximum", min)
        return least if max is None else least.apply("minimum", max)

    def masked_fill(self, mask: Element, number: float) -> Element:
        """A number where the mask is true."""
        return where(mask, number, self)

    def isnan(self) -> Element:
        """Whether it is NaN."""
        return self.apply("isnan", dtype=torch.bool)

    def isfinite(self) -> Element:
        """Whether it is neither infinite nor NaN."""
        return self.apply("abs").apply("lt", math.inf, dtype=torch.bool)

    def reciprocal(self) -> Element:
        """One divided by it."""
        return self.apply("reciprocal")

    def __invert__(self) -> Element:
        return self.apply("logical_not" if self.dtype == torch.bool else "bitwise_not")

    def __neg__(self) -> Element:
        return self.apply("neg")

    def __rsub__(self, other: float) -> Element:
        return self.like(other) - self

    __hash__ = None  # type: ignore[assignment]
    __lt__, __le__, __gt__, __ge__, __eq__ = (_operator(name, torch.bool) for name in ("lt", "le", "gt", "ge", "eq"))  # type: ignore[assignment]
    add = __add__ = __radd__ = _operator("add")
    sub = __sub__ = _operator("sub")
    __mul__ = __rmul__ = _operator("mul")
    __truediv__ = _operator("truediv")
    bitwise_and = __and__ = __rand__ = _operator("bitwise_and")
    __or__ = __ror__ = _operator("bitwise_or")
    bitwise_xor = __xor__ = __rxor__ = _operator("bitwise_xor")
    __lshift__ = _operator("bitwise_left_shift")
    bitwise_right_shift = __rshift__ = _operator("bitwise_right_shift")
    add_, sub_, clamp_ = _in_place(add), _in_place(sub), _in_place(clamp)
    bitwise_and_, bitwise_xor_, bitwise_right_shift_ = map(_in_place, (bitwise_and, bitwise_xor, bitwise_right_shift))


def constant(number: float, dtype: torch.dtype) -> Element:
    """A number as an element."""
    from torch._inductor.virtualized import ops  # imports sympy

    return Element(ops.constant(float(number) if dtype.is_floating_point else int(number), dtype), dtype)


def where(mask: Element, one: Element | float, other: Element | float) -> Element:
    """`torch.where`; two integers make an element of int64, as in torch."""
    from torch._inductor.virtualized import ops  # imports sympy

    given = [x.dtype for x in (one, other) if isinstance(x, Element)] or [torch.int64]
    dtype = torch.promote_types(given[0], given[-1])
    first, second = ((x.to(dtype) if isinstance(x, Element) else constant(x, dtype)).value for x in (one, other))
    return Element(ops.where(mask.value, first, second), dtype)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Element]] = {
    torch.where: where,
    torch.zeros_like: lambda x: x.like(0),
    torch.ones_like: lambda x: x.like(1),
    torch.bitwise_left_shift: lambda number, by: by.like(number) << by,
}
