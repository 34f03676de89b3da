"""The arithmetic of a matrix product: its dtype and bits, the accumulator that adds, the factors of its result, and its groups."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qsim.accumulators.chips import Chip
from qsim.functional.matmul import accumulated
from qsim.nn.product import float32
from qsim.private import grouped_mm
from qsim_kernels.ops.direct import Operators
from qsim_kernels.torch.sums import ChainScales

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Arithmetic(NamedTuple):
    """The computation of a product of operands in their carrier.

    Attributes:
        dtype: The dtype of the result.
        ops: The operators.
        exact: Whether the operands are float32 whose precision must not be reduced.
        is_torchs: Whether torch's own function of the operands gives the result.
        sum: The emulated accumulator that adds, spelled as for the operator; `None` for torch's own sum.
        stream: Its stream of random bits.
        chip: Whether the chip may multiply, if it adds like this.
        factors: Scales that the operands were divided by, as `along` spreads them; the result is multiplied by them before anything else.
        seed: Needed only for stochastic sums.
        chains: The scales of the short sums of the left operand and of the right one, if they have any.
        ends: The ends of the groups of rows, in a grouped product.
    """

    dtype: torch.dtype
    ops: Operators
    exact: bool = False
    is_torchs: bool = False
    sum: str | None = None
    stream: int = 0
    chip: Chip = "auto"
    factors: tuple[Tensor, ...] = ()
    seed: Tensor | None = None
    chains: tuple[ChainScales | None, ChainScales | None] = (None, None)
    ends: Tensor | None = None

    def widened(self) -> Arithmetic:
        """The same in at least float32, before factors: results that are changed further must not be rounded to 16 bits before."""
        return self._replace(dtype=_WIDE.get(self.dtype, self.dtype), factors=(), is_torchs=False)


def rows(x: Tensor) -> Tensor:
    """All dimensions but the last merged into one; torch does not allow -1 for rows without elements."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def multiply(a: Tensor, b: Tensor, how: Arithmetic, bias: Tensor | None = None) -> Tensor:
    """The matrix product of two operands in their carrier, or those of their groups, times factors, plus a bias."""
    if how.is_torchs and bias is None:
        return torch.matmul(a, b)
    dtype, ops, factors = how.dtype, how.ops, how.factors
    if how.ends is not None:
        return _product_of_groups(a, b, how, how.ends)
    if not factors and (bias is None or (how.sum is not None and how.chains == (None, None))):
        return _product(a, b, how, dtype, bias)
    if factors and how.sum is None and a.is_cuda and a.dim() == 2 and a.dtype == b.dtype and a.dtype in _WIDE:
        return ops.matmul_rescaled(a, b, factors, bias, dtype)  # type: ignore[no-any-return]
    return ops.rescaled(_product(a, b, how, _WIDE.get(dtype, dtype)), factors, bias, dtype)  # type: ignore[no-any-return]


def _product(a: Tensor, b: Tensor, how: Arithmetic, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """The product as torch or an accumulator sums it, in a dtype; only an accumulator adds a bias."""
    if how.sum is not None:
        return _accumulated(a, b, how, how.sum, dtype, bias)
    if how.exact:
        return in_dtype(float32.matmul(a, b), dtype)
    if a.dtype == dtype:
        return torch.matmul(a, b)
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        product = torch.mm(a, b, out_dtype=torch.float32) if a.dim() == 2 else torch.bmm(a, b, out_dtype=torch.float32)
        return in_dtype(product, dtype)
    return torch.matmul(a, b).to(dtype)


def _accumulated(a: Tensor, b: Tensor, how: Arithmetic, spelt: str, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The product of two matrices, or of batches of them, by an accumulator; it adds a bias if short sums have no scales."""
    if how.chains == (None, None):
        return accumulated(how.ops, a, b, how.seed, spelt, how.stream, dtype=dtype, chip=how.chip, bias=bias)
    # An operand without scales has a single one, or none if it has no elements.
    one = a.new_ones((1, 1), dtype=torch.float32)
    left, right = (
        chains or ChainScales(one[:lines, : a.shape[-1]], max(lines, 1), max(a.shape[-1], 1))
        for chains, lines in zip(how.chains, (a.shape[-2], b.shape[-1]), strict=True)
    )
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    operands = (x.expand(*batch, *x.shape[-2:]) for x in (a, b, left.values, right.values))
    shared = [left.lines, left.sums, right.lines, right.sums]
    return in_dtype(how.ops.accumulate_scaled(*operands, shared, how.seed, spelt, how.stream, 0, how.chip), dtype)


def _product_of_groups(a: Tensor, b: Tensor, how: Arithmetic, ends: Tensor) -> Tensor:
    """The products of groups: of rows of `a` with a matrix each, or of columns of `a` with rows of `b`.

    The ends of the groups are a tensor, which the host reads only for large groups under scales. As in torch's function, rows after the
    last group are undefined, in the result and in the gradient of the first operand.
    """
    given = a, b, ends, how.factors, how.dtype
    if how.sum is not None:
        return torch.ops.qsim.grouped_accumulate.default(*given, how.seed, how.sum, how.stream, how.chip)  # type: ignore[no-any-return]
    if a.dtype == b.dtype == how.dtype == torch.bfloat16 and not how.factors and grouped_mm is not None:
        return grouped_mm(a, b, offs=ends)  # type: ignore[no-any-return]
    return torch.ops.qsim.grouped_matmul.default(*given, how.exact)  # type: ignore[no-any-return]


def rescaled(product: Tensor, how: Arithmetic, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """A product of float32 or float64 times scales that were left out of its operands, plus a bias, rounded once to the result's dtype."""
    return how.ops.rescaled(product, how.factors, bias, dtype)  # type: ignore[no-any-return]


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result in the requested dtype.

    torch 2.11's compiler gives zero for the gradients of an autograd function whose result went through a conversion to its own dtype.
    """
    return x if x.dtype == dtype else x.to(dtype)
