"""The arithmetic of a matrix product: its dtype and bits, the accumulator that adds, and the factors of its result."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsim.accumulators.chips import Chip
from qsim.functional.matmul import accumulated
from qsim.nn.product import float32


class Adder(NamedTuple):
    """The emulated accumulator of a product.

    Attributes:
        how: The sum, spelled as for the operator.
        seed: Needed only for stochastic rounding.
        stream: The stream of random bits.
        chip: Whether the chip may multiply, if it adds like this.
    """

    how: str
    seed: Tensor | None
    stream: int
    chip: Chip = "auto"


class Arithmetic(NamedTuple):
    """The computation of a product of operands in their carrier.

    Attributes:
        dtype: The dtype of the result.
        exact: Whether the operands are float32 whose precision must not be reduced.
        factors: Scales that the operands were divided by, as `directions` spreads them; the result is multiplied by them before anything
            else.
        adder: The emulated accumulator that adds, if any.
    """

    dtype: torch.dtype
    exact: bool = False
    factors: tuple[Tensor, ...] = ()
    adder: Adder | None = None

    def multiplies_like_torch(self, operands: torch.dtype) -> bool:
        """Whether torch's own product of operands of a dtype is the result."""
        return operands == self.dtype and not self.exact and len(self.factors) == 0 and self.adder is None

    def widened(self) -> Arithmetic:
        """The same in at least float32, before factors: results that are changed further must not be rounded to 16 bits before."""
        return self._replace(dtype=torch.promote_types(self.dtype, torch.float32), factors=())


def multiply(a: Tensor, b: Tensor, how: Arithmetic, bias: Tensor | None = None) -> Tensor:
    """The matrix product of two operands in their carrier, summed in float32 or by an adder, times factors, plus a bias."""
    if how.factors or bias is not None:
        return rescaled(multiply(a, b, how.widened()), how.factors, how.dtype, bias)
    if how.adder is not None:
        adder = how.adder
        return accumulated(a, b, adder.seed, adder.how, adder.stream, dtype=how.dtype, chip=adder.chip)
    if how.exact:
        return in_dtype(float32.matmul(a, b), how.dtype)
    if a.dtype == how.dtype:
        return torch.matmul(a, b)
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        product = torch.mm(a, b, out_dtype=torch.float32) if a.dim() == 2 else torch.bmm(a, b, out_dtype=torch.float32)
        return in_dtype(product, how.dtype)
    return torch.matmul(a, b).to(how.dtype)


def rescaled(product: Tensor, factors: tuple[Tensor, ...], dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """A product of float32 or float64 times scales that were left out of its operands, plus a bias, rounded once to the result's dtype."""
    return torch.ops.qsim.rescaled.default(product, factors, bias, dtype)  # type: ignore[no-any-return]


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result in the requested dtype.

    torch 2.11's compiler gives zero for the gradients of an autograd function whose result went through a conversion to its own dtype.
    """
    return x if x.dtype == dtype else x.to(dtype)
