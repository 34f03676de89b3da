"""The arithmetic of a matrix product: its dtype and bits, the accumulator that adds, and the factors of its result."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsim.accumulators.chips import Chip
from qsim.functional.matmul import accumulated
from qsim.nn.product import float32
from qsim_kernels.ops.direct import Operators
from qsim_kernels.torch.scaled_sums import ChainScales


class Adder(NamedTuple):
    """The emulated accumulator of a product.

    Attributes:
        how: The sum, spelled as for the operator.
        seed: Needed only for stochastic rounding.
        stream: The stream of random bits.
        chip: Whether the chip may multiply, if it adds like this.
        chains: The scales of the short sums of the left operand and of the right one, if they have any.
    """

    how: str
    seed: Tensor | None
    stream: int
    chip: Chip = "auto"
    chains: tuple[ChainScales | None, ChainScales | None] = (None, None)

    @property
    def adds_bias(self) -> bool:
        """Whether it can add a bias, too."""
        return self.chains == (None, None)

    def product(self, ops: Operators, a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """The product of two matrices, or of batches of them, plus a bias if it adds one."""
        if self.chains == (None, None):
            return accumulated(ops, a, b, self.seed, self.how, self.stream, dtype=dtype, chip=self.chip, bias=bias)
        # An operand without scales has a single one.
        one = ChainScales(a.new_ones((1, 1), dtype=torch.float32), max(a.shape[-2], b.shape[-1], 1), max(a.shape[-1], 1))
        left, right = (chains or one for chains in self.chains)
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        operands = (x.expand(*batch, *x.shape[-2:]) for x in (a, b, left.values, right.values))
        shared = [left.lines, left.sums, right.lines, right.sums]
        given = (shared, self.seed, self.how, self.stream, 0, self.chip)
        return in_dtype(ops.accumulate_scaled(*operands, *given), dtype)


_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Arithmetic(NamedTuple):
    """The computation of a product of operands in their carrier.

    Attributes:
        dtype: The dtype of the result.
        ops: The operators.
        exact: Whether the operands are float32 whose precision must not be reduced.
        factors: Scales that the operands were divided by, as `directions` spreads them; the result is multiplied by them before anything
            else.
        adder: The emulated accumulator that adds, if any.
    """

    dtype: torch.dtype
    ops: Operators
    exact: bool = False
    factors: tuple[Tensor, ...] = ()
    adder: Adder | None = None

    def widened(self) -> Arithmetic:
        """The same in at least float32, before factors: results that are changed further must not be rounded to 16 bits before."""
        return Arithmetic(_WIDE.get(self.dtype, self.dtype), self.ops, self.exact, (), self.adder)


class Left(NamedTuple):
    """Factors and scales left to multiply by after a tensor was rounded under scales.

    Attributes:
        factors: Factors for the result of a product, if any.
        scales: The scales that were not multiplied in.
        chains: The scales that enter with short sums.
    """

    factors: tuple[Tensor, ...] = ()
    scales: Tensor | None = None
    chains: ChainScales | None = None


_NOTHING = Left()


class ArithmeticPlan(NamedTuple):
    """The computation of one of a layer's three products, as far as it is known before their operands.

    Attributes:
        held: The dtype of both operands.
        plain: The computation where nothing is left to multiply by and no accumulator adds.
        sum: The emulated accumulator, spelled as for the operator; `None` for torch's own.
        sum_stream: Its stream of random bits.
        chip: Whether the chip may multiply, if it adds like this.
        is_turned: Whether the gradient of the result is the right operand.
    """

    held: torch.dtype
    plain: Arithmetic
    sum: str | None
    sum_stream: int
    chip: Chip
    is_turned: bool

    def after(self, ops: Operators, one: Left | None, other: Left | None, seed: Tensor | None) -> Arithmetic:
        """The computation after both operands are rounded.

        Args:
            ops: The operators.
            one: What is left to multiply by of the first operand forward, and of the result's gradient backward.
            other: The same of the other operand.
            seed: Needed only for stochastic sums.
        """
        one, other = one or _NOTHING, other or _NOTHING
        left, right = (other, one) if self.is_turned else (one, other)
        adder = None if self.sum is None else Adder(self.sum, seed, self.sum_stream, self.chip, (left.chains, right.chains))
        return Arithmetic(self.plain.dtype, ops, self.plain.exact, one.factors + other.factors, adder)


def multiply(a: Tensor, b: Tensor, how: Arithmetic, bias: Tensor | None = None) -> Tensor:
    """The matrix product of two operands in their carrier, summed in float32 or by an adder, times factors, plus a bias."""
    dtype, ops, exact, factors, adder = how
    if adder is not None and not factors and (bias is None or adder.adds_bias):
        return adder.product(ops, a, b, dtype, bias)
    if not factors and bias is None:
        return _product(a, b, dtype, exact)
    if factors and adder is None and a.is_cuda and a.dim() == 2 and a.dtype == b.dtype and a.dtype in _WIDE:
        return ops.matmul_rescaled(a, b, factors, bias, dtype)  # type: ignore[no-any-return]
    wide = _WIDE.get(dtype, dtype)
    product = _product(a, b, wide, exact) if adder is None else adder.product(ops, a, b, wide)
    return ops.rescaled(product, factors, bias, dtype)  # type: ignore[no-any-return]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, exact: bool) -> Tensor:
    """The product as torch sums it, in a dtype."""
    if exact:
        return in_dtype(float32.matmul(a, b), dtype)
    if a.dtype == dtype:
        return torch.matmul(a, b)
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        product = torch.mm(a, b, out_dtype=torch.float32) if a.dim() == 2 else torch.bmm(a, b, out_dtype=torch.float32)
        return in_dtype(product, dtype)
    return torch.matmul(a, b).to(dtype)


def rescaled(product: Tensor, how: Arithmetic, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """A product of float32 or float64 times scales that were left out of its operands, plus a bias, rounded once to the result's dtype."""
    return how.ops.rescaled(product, how.factors, bias, dtype)  # type: ignore[no-any-return]


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result in the requested dtype.

    torch 2.11's compiler gives zero for the gradients of an autograd function whose result went through a conversion to its own dtype.
    """
    return x if x.dtype == dtype else x.to(dtype)
