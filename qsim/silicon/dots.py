"""A circuit that adds products: a multiply-add, or a step of a matrix unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from qsim.accumulators import Aligned, BlockScaled, Promoted, Rounded, resolve
from qsim.formats import FP32, Format, format as resolve_format, holds
from qsim.formats.base import check_integer
from qsim.silicon.circuits import described, identifier

#: The most products of one circuit.
_MOST_PRODUCTS = 256


class CodeVector(NamedTuple):
    """A vector of codes, which are multiplied in a sum.

    Attributes:
        format: Their format.
        size: Their number.
    """

    format: Format
    size: int


@dataclass(frozen=True)
class Dot:
    """Products of two vectors, added to a running sum as an accumulator adds them.

    With `Rounded` and a length of 1 this is a multiply-add. The running sum is given and returned as a code of the accumulator's format.
    A length that is no whole number of steps ends in a short one, so that several such sums are not the sum of all their products.
    A `BlockScaled` accumulator also takes the codes of scales, those of both operands for each of its groups.

    Args:
        accumulator: A name such as `"h100_fp8"`, a call such as `"Rounded('fp16')"`, or an `Accumulator`; `Rounded` in sequential order.
        a: The format of the left operand's elements.
        b: That of the right operand's; by default the same.
        length: The number of products; by default those of one step: 1, a block, a chunk, or as many as are promoted at once.

    Example:
        >>> from qsim.silicon import Dot
        >>> Dot("Rounded('fp16')", "e4m3").name, Dot("h100_fp8", "e4m3", "e5m2").name, Dot("h100_fp8", "e4m3").length
        ('qsim_dot1_rounded_fp16_e4m3', 'qsim_dot32_h100_fp8_e4m3_e5m2', 32)
    """

    accumulator: Any
    a: Any
    b: Any = None
    length: int = 0

    def __post_init__(self) -> None:
        adder = resolve(self.accumulator)
        object.__setattr__(self, "accumulator", adder)
        for part in (adder, *([adder.inner] if isinstance(adder, Promoted) else [])):
            if isinstance(part, Rounded) and part.order != "sequential":
                raise ValueError(f"a circuit adds products in sequential order, got {part!r}")
        object.__setattr__(self, "a", resolve_format(self.a))
        object.__setattr__(self, "b", self.a if self.b is None else resolve_format(self.b))
        adder.sum_of(self.a, self.b)
        for fmt in (*(factors.format for factors in self.factors.values()), self.total):
            if not holds(torch.float32, fmt):
                raise ValueError(f"{fmt!r} has values that float32 lacks: circuits read and write float32's numbers")
        if self.length == 0:
            object.__setattr__(self, "length", adder.every if isinstance(adder, Promoted) else adder.step)
        check_integer("Dot", "length", self.length, 1, _MOST_PRODUCTS)

    @property
    def total(self) -> Format:
        """The format of the running sum."""
        fmt: Format = FP32
        if isinstance(self.accumulator, Rounded):
            fmt = self.accumulator.format
        elif isinstance(self.accumulator, Aligned):
            fmt = self.accumulator.out
        return fmt

    @property
    def scale(self) -> Format | None:
        """The format of the operands' scales, if the sum has scales."""
        return self.accumulator.scale if isinstance(self.accumulator, BlockScaled) else None

    @property
    def factors(self) -> dict[str, CodeVector]:
        """The numbers that are multiplied, by the names of parameters: elements of both operands, and their scales if there are some."""
        found = {"a": CodeVector(self.a, self.length), "b": CodeVector(self.b, self.length)}
        if self.scale is not None:
            found["scale_a"] = found["scale_b"] = CodeVector(self.scale, -(-self.length // self.accumulator.group))
        return found

    @property
    def name(self) -> str:
        """The name of the function or module."""
        adder = self.accumulator.label or re.sub(r"\W+", "_", repr(self.accumulator).replace("-", "m")).strip("_").lower()
        operands = [identifier(self.a), *([] if self.a == self.b else [identifier(self.b)])]
        return "_".join([f"qsim_dot{self.length}", adder, *operands])

    @property
    def random_bits(self) -> int:
        """The bits of each random integer; 0 without stochastic rounding."""
        bits: int = self._rounded.rounding.rule("saturate").bits if self.accumulator.is_stochastic else 0
        return bits

    @property
    def draws(self) -> int:
        """The number of random integers that are read; 0 without stochastic rounding."""
        if not self.accumulator.is_stochastic:
            return 0
        rounded = self._rounded
        each: int = 1 + (rounded.product is not None)
        if rounded is self.accumulator:
            chunks: int = -(-self.length // rounded.chunk)
            return each * chunks
        every: int = self.accumulator.every
        whole, rest = divmod(self.length, every)
        return each * (whole * -(-every // rounded.chunk) + -(-rest // rounded.chunk))

    @property
    def _rounded(self) -> Rounded:
        adder: Any = self.accumulator
        inner: Any = adder.inner if isinstance(adder, Promoted) else adder
        found: Rounded = inner
        return found

    @property
    def specification(self) -> tuple[str, ...]:
        """Lines that say what the circuit computes."""
        products = "product" if self.length == 1 else "products"
        lines = [
            f"Adds {self.length} {products} to a running sum.",
            f"a: {described(self.a)}. b: {described(self.b)}. c, the running sum, and the result: {described(self.total)}.",
            *self.accumulator.describe().splitlines(),
        ]
        if self.scale is not None:
            lines.insert(2, f"scale_a, scale_b: {described(self.scale)}, one for every {self.accumulator.group} elements of a and of b.")
        if self.draws:
            lines.append(f"random: {self.draws} integers of {self.random_bits} bits, all values equally likely, in the order of roundings.")
        return tuple(lines)
