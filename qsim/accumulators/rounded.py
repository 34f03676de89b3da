"""Sums that are rounded to a format as they grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from qsim import rounding as _rounding
from qsim.accumulators.base import Accumulator, brief, call_of, smallest_exponent
from qsim.formats import BF16, FP16, Format, contains, format as resolve_format
from qsim.formats.base import check_integer
from qsim.rounding import Overflow, Rounding, Stochastic
from qsim_kernels.numbers import sums
from qsim_kernels.numbers.grid import Rule

Order = Literal["sequential", "pairwise", "kahan"]


@dataclass(frozen=True, init=False, repr=False)
class Rounded(Accumulator):
    """A running sum that is rounded to a format after every product, or after every `chunk` of products.

    With `chunk=1` each step is a fused multiply-add: the exact product is added to the sum, and the result is rounded once. Longer chunks
    are summed by a matrix unit, an H100's for bfloat16 (`"h100_bf16"`) from a fresh sum, and its float32 result is added to the running sum
    with one rounding to `format`. So the sum of a chunk is nearly exact, but not quite: that is what a narrow accumulator behind a real
    matrix unit receives.

    Args:
        format: The running sum's format: a name, a torch dtype or a `Format` that has zero.
        chunk: Number of products between two roundings: 1, or a multiple of 16, which a matrix unit adds at once.
        rounding: A name or a `Rounding`.
        product: A format to which each product is rounded before it is added: a separate multiplication and addition.
        order: `"sequential"`; `"pairwise"`, a balanced tree of sums; or `"kahan"`, which carries along what each addition loses.
        overflow: `"format"`: infinities where the format has them, and saturation elsewhere; or another mode of
            `qsim.rounding.Overflow`. Kept as one of these. Products saturate where the sum does, or their format has no infinities.

    Example:
        >>> import torch, qsim
        >>> a, b = torch.ones(1, 4096), torch.ones(4096, 1)
        >>> qsim.matmul(a, b, "Rounded('fp16')"), qsim.matmul(a, b, qsim.accumulators.Rounded("bf16"))
        (tensor([[2048.]]), tensor([[256.]]))
        >>> qsim.accumulators.Rounded("fp16", chunk=64, rounding="stochastic")
        Rounded('fp16', chunk=64, rounding='stochastic')
    """

    format: Format
    chunk: int
    rounding: Rounding
    product: Format | None
    order: Order
    overflow: Overflow

    def __init__(
        self,
        format: str | torch.dtype | Format,
        chunk: int = 1,
        rounding: str | Rounding = "nearest",
        product: str | torch.dtype | Format | None = None,
        order: Order = "sequential",
        overflow: Overflow = "format",
    ) -> None:
        of_sum, how = resolve_format(format), _rounding.resolve(rounding)
        of_product = None if product is None else resolve_format(product)
        _rounding.check_overflow(overflow)
        for name, value in {
            "format": of_sum,
            "chunk": _checked_chunk(chunk),
            "rounding": how,
            "product": of_product,
            "order": order,
            "overflow": _rounding.overflow_in(of_sum, overflow),
        }.items():
            object.__setattr__(self, name, value)
        if order not in get_args(Order):
            raise ValueError(f"Rounded: order must be one of {', '.join(map(repr, get_args(Order)))}, got {order!r}")
        if of_product is not None and chunk > 1:
            raise ValueError(f"Rounded: product= is for chunk=1: within a chunk a matrix unit adds exact products, got chunk={chunk}")
        for fmt in (of_sum, *([] if of_product is None else [of_product])):
            _check_format(fmt, how.rule("saturate"))
        self._derive(self._call(), is_stochastic=how.is_stochastic, step=chunk)

    def _call(self) -> str:
        rounding = repr(self.rounding) if isinstance(self.rounding, Stochastic) else str(self.rounding)
        return call_of(
            "Rounded",
            repr(brief(self.format)),
            chunk=(self.chunk, 1),
            rounding=("stochastic" if rounding == "Stochastic()" else rounding, "nearest"),
            product=(None if self.product is None else brief(self.product), None),
            order=(self.order, "sequential"),
            overflow=(self.overflow, _rounding.overflow_in(self.format, "format")),
        )

    def _rows(self) -> list[tuple[str, str]]:
        if self.chunk > 1:
            step = f"{self.chunk} products, whose sum in float32 is that of an H100"
        elif self.product is not None:
            step = f"one product, rounded to {brief(self.product)} before"
        else:
            step = "one exact product"
        return [
            ("step", step),
            ("running sum", f"{brief(self.format)}, {self.rounding}"),
            ("order", self.order),
            ("overflow", self.overflow),
            ("operands", "any that float32 holds"),
        ]

    def sum_of(self, a: Format, b: Format) -> sums.Sum:  # noqa: D102 (documented above)
        lows = _exponents(a, b) if self.chunk > 1 else (sums.CHUNK_SUM.low_a, sums.CHUNK_SUM.low_b)
        for fmt in (a, b):
            smallest_exponent(fmt)  # raises for operands that are too wide
        grid = rule = None
        if self.product is not None:
            overflow = _rounding.overflow_in(self.product, "format") if self.overflow == "nonfinite" else self.overflow
            grid, rule = self.product.grid, self.rounding.rule(overflow)
        return sums.RoundedSum(
            self.format.grid,
            self.rounding.rule(self.overflow),
            grid,
            rule,
            self.chunk,
            int(sums.Order[self.order.upper()]),
            *lows,
        )


def _checked_chunk(chunk: int) -> int:
    block = sums.CHUNK_SUM.block
    check_integer("Rounded", "chunk", chunk, 1, 2**31)
    if chunk > 1 and chunk % block:
        raise ValueError(f"Rounded: chunk must be 1 or a multiple of {block}, the products that a matrix unit adds at once, got {chunk}")
    return chunk


def _check_format(fmt: Format, rule: Rule) -> None:
    """Raise an error for a format in which a sum cannot begin at zero, or whose roundings are not exact here."""
    if fmt.grid.table:
        raise ValueError(f"Rounded: sums are rounded to floats, integers or fixed point, not to a table like {brief(fmt)}")
    if not fmt.has_zero:
        raise ValueError(f"Rounded: a sum begins at zero, which {brief(fmt)} lacks")
    if fmt.grid.mantissa > sums.MOST_MANTISSA_AND_NOISE:
        raise ValueError(f"Rounded: {brief(fmt)} has {fmt.grid.mantissa} mantissa bits, and sums have {sums.MOST_MANTISSA_AND_NOISE}")
    needed, most = fmt.grid.mantissa + rule.bits + rule.correction, sums.MOST_MANTISSA_AND_NOISE
    if needed > most:
        bits = most - fmt.grid.mantissa - rule.correction
        raise ValueError(
            f"Rounded: {rule.bits} random bits below the {fmt.grid.mantissa} bits of {brief(fmt)} are more than are known of a sum: give "
            f"rounding=Stochastic(bits={bits}) or fewer"
        )


def _exponents(a: Format, b: Format) -> tuple[int, int]:
    """The smallest exponents of operands in the matrix unit that sums a chunk: it takes both in bfloat16, or else both in float16."""
    for own in (BF16, FP16):
        if contains(own, a) and contains(own, b):
            return own.grid.exponent, own.grid.exponent
    return smallest_exponent(a), smallest_exponent(b)
