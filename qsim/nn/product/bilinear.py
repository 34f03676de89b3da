"""The bilinear operations of layers: the forward product of each, and the two products of its backward pass.

Operands are in their carrier and results in the requested dtype; nothing here rounds to a format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.nn.product import grouped  # noqa: F401 (its operators)
from qsim.nn.product.arithmetic import Arithmetic, multiply, rescaled, rows
from qsim.nn.product.carriers import ProductCarrier, Values, product_carrier
from qsim.nn.product.sites import RoundedOperand
from qsim_kernels.ops.direct import Operators


@dataclass(frozen=True, eq=False)
class Product:
    """An operation that is linear in two operands.

    Attributes:
        equation: Two dimensions of both operands and of the result, as `torch.einsum` writes them: those along which all six operands of
            the three products are scaled follow from it.
        gradient_first: Whether the gradient is the left operand of the product that gives the second operand's gradient.
        sums_rows: Whether the gradient of the bias is the sum over all dimensions of the result but the last.
        merges_rows: Whether all dimensions but the last of the first operand and the result count as one if the second is a matrix.
        joins_gradients: Whether both operands' gradients may come from one operator, as in torch.
        is_lookup: Whether it copies rows of the second operand instead of multiplying.
        constant: A constant for compilers that specifies the operation; `None` if it may depend on sizes, or there is none.
        names: The names of the three products, for errors.
    """

    equation: ClassVar[str]
    gradient_first: ClassVar[bool] = True
    sums_rows: ClassVar[bool] = False
    merges_rows: ClassVar[bool] = False
    joins_gradients: ClassVar[bool] = False
    is_lookup: ClassVar[bool] = False
    constant: ClassVar[Any] = None
    names: ClassVar[tuple[str, str, str]] = (
        "the forward product",
        "the product for the input's gradient",
        "the product for the weight's gradient",
    )

    def carrier(self, index: int, one: Values, other: Values, result: torch.dtype, device: torch.device) -> ProductCarrier:
        """The carrier of the operands of one of the three products, of which each is given by a format that holds its values."""
        return product_carrier(one, other, device)

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, how: Arithmetic) -> Tensor:
        """The result, with the bias added."""
        raise NotImplementedError

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, how: Arithmetic) -> Tensor:
        """The gradient of the first operand."""
        raise NotImplementedError

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:
        """The gradient of the second operand."""
        raise NotImplementedError

    def gradients(self, g: Tensor, w: Tensor, a: Tensor, first: Arithmetic, second: Arithmetic) -> tuple[Tensor, Tensor]:
        """The gradients of both operands from one operator."""
        raise NotImplementedError

    def grad_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias, if the operation has one."""
        raise NotImplementedError


class Multiplication(NamedTuple):
    """One of a layer's three products, as far as it is known before its operands.

    Attributes:
        compute: The method of a `Product` that computes it.
        product: The operation.
        carrier: The dtype of both operands.
        plain: Its arithmetic where nothing is left to multiply by.
        is_turned: Whether the gradient of the result is the right operand.
    """

    compute: Literal["forward", "grad_a", "grad_w"]
    product: Product
    carrier: torch.dtype
    plain: Arithmetic
    is_turned: bool

    def of(self, ops: Operators, x: RoundedOperand, y: RoundedOperand, seed: Tensor | None, ends: Tensor | None) -> Arithmetic:
        """Its arithmetic for two rounded operands.

        Args:
            ops: The operators.
            x: The first operand forward, and the result's gradient backward.
            y: The other operand.
            seed: Needed only for stochastic sums.
            ends: The ends of the groups, in a grouped product.
        """
        dtype, _, exact, _, how, stream, chip, *_ = self.plain
        chains = (y.chains, x.chains) if self.is_turned else (x.chains, y.chains)
        factors = tuple(factor for factor in (x.factor, y.factor) if factor is not None)
        return Arithmetic(dtype, ops, exact, False, how, stream, chip, factors, seed, chains, ends)

    def multiply(self, ops: Operators, x: RoundedOperand, y: RoundedOperand, last: Any, seed: Tensor | None, ends: Tensor | None) -> Tensor:
        """The product; arguments are those of `of`, and the bias, or the shape of the gradient."""
        is_plain = self.plain.is_torchs and x.factor is None and y.factor is None and ends is None
        how = self.plain if is_plain else self.of(ops, x, y, seed, ends)
        return getattr(self.product, self.compute)(x.values, y.values, last, how)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class LinearProduct(Product):
    """`a @ w.T`, over the last dimension of `a`, which may have any number of others, or that of each group of rows with its matrix."""

    equation: ClassVar[str] = "...mk,nk->mn"
    sums_rows: ClassVar[bool] = True
    merges_rows: ClassVar[bool] = True
    constant: ClassVar[Any] = ("linear",)

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        if how.is_torchs:
            return F.linear(a, w, bias)
        if a.dim() == 2:
            return multiply(a, w.mT, how, bias)
        return multiply(rows(a), w.mT, how, bias).view(*a.shape[:-1], w.shape[0])

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        if g.dim() != 2:
            return multiply(rows(g), w, how).view(a_shape)
        return torch.matmul(g, w) if how.is_torchs else multiply(g, w, how)

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        if g.dim() != 2:
            g, a = rows(g), rows(a)
        return torch.matmul(g.t(), a) if how.is_torchs else multiply(g.t(), a, how)

    def grad_bias(self, g: Tensor) -> Tensor:  # noqa: D102 (documented above)
        return (g if g.dim() == 2 else rows(g)).sum(0)


LINEAR = LinearProduct()


@dataclass(frozen=True, eq=False)
class MatmulProduct(Product):
    """`a @ b` of matrices or batches of them, batch dimensions being broadcast, or that of each group of rows with its matrix."""

    equation: ClassVar[str] = "...mk,kn->mn"
    gradient_first: ClassVar[bool] = False
    merges_rows: ClassVar[bool] = True
    constant: ClassVar[Any] = ("matmul",)

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        return _batched(a, w, how)

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        return _summed(g, w.mT, a_shape, how)

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        if len(w_shape) == 2:
            return multiply(rows(a).t(), rows(g), how)
        return _summed(a.mT, g, w_shape, how)


MATMUL = MatmulProduct()


def _batched(a: Tensor, b: Tensor, how: Arithmetic) -> Tensor:
    """A product of batches of matrices; those that share their second operand are multiplied as one."""
    if how.ends is not None:
        return multiply(a, b, how)
    if b.dim() == 2:
        return multiply(rows(a), b, how).view(*a.shape[:-1], b.shape[-1])
    if how.factors:
        return rescaled(_batched(a, b, how.widened()), how, how.dtype)
    if a.dtype == how.dtype or how.sum is not None:
        return multiply(a, b, how)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    a3 = a.expand(*batch, *a.shape[-2:]).reshape(count, *a.shape[-2:])
    b3 = b.expand(*batch, *b.shape[-2:]).reshape(count, *b.shape[-2:])
    return multiply(a3, b3, how).view(*batch, a.shape[-2], b.shape[-1])


def _summed(a: Tensor, b: Tensor, shape: torch.Size, how: Arithmetic) -> Tensor:
    """A product that is summed over the batches to which its operand was broadcast, before it is rounded to 16 bits."""
    if how.ends is not None:
        return multiply(a, b, how)
    broadcast = shape[:-2] != torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    own = how._replace(dtype=torch.promote_types(how.dtype, torch.float32), is_torchs=False) if broadcast else how
    return _batched(a, b, own).sum_to_size(shape).to(how.dtype)
