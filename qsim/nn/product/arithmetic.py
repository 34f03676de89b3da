"""The arithmetic of a matrix product: its dtype and bits, the accumulator that adds, and the factors of its result."""

from __future__ import annotations

import math
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
        factors: Scales that the operands were divided by, as `along` spreads them; the result is multiplied by them before anything else.
        adder: The emulated accumulator that adds, if any.
        ends: The ends of the groups of rows, in a grouped product.
    """

    dtype: torch.dtype
    ops: Operators
    exact: bool = False
    factors: tuple[Tensor, ...] = ()
    adder: Adder | None = None
    ends: Tensor | None = None

    def widened(self) -> Arithmetic:
        """The same in at least float32, before factors: results that are changed further must not be rounded to 16 bits before."""
        return Arithmetic(_WIDE.get(self.dtype, self.dtype), self.ops, self.exact, (), self.adder)


def rows(x: Tensor) -> Tensor:
    """All dimensions but the last merged into one; torch does not allow -1 for rows without elements."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def multiply(a: Tensor, b: Tensor, how: Arithmetic, bias: Tensor | None = None) -> Tensor:
    """The matrix product of two operands in their carrier, summed in float32 or by an adder, times factors, plus a bias."""
    dtype, ops, exact, factors, adder, _ = how
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
