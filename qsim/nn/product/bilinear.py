"""The bilinear operations of layers: the forward product of each, and the two products of its backward pass.

Operands are in their carrier and results in the requested dtype; nothing here rounds to a format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.nn.product import directions
from qsim.nn.product.arithmetic import Arithmetic, multiply, rescaled
from qsim.nn.product.directions import Directions

#: What an operand's gradient is a product of: the gradient of the result, the other operand, and the computation.
BackwardOperands = tuple[Tensor, Tensor, Arithmetic]


@dataclass(frozen=True, eq=False)
class Product:
    """An operation that is linear in two operands.

    Attributes:
        gradient_first: Whether the gradient is the left operand of the product that gives the second operand's gradient.
        sums_rows: Whether the gradient of the bias is the sum over all dimensions of the result but the last.
        joins_gradients: Whether both operands' gradients may come from one operator, for which all operands must be in memory at once.
        directions: The dimensions along which operands are scaled.
    """

    gradient_first: ClassVar[bool] = True
    sums_rows: ClassVar[bool] = False
    joins_gradients: ClassVar[bool] = False
    directions: ClassVar[Directions]

    @property
    def constant(self) -> Any:
        """A constant for compilers that specifies this operation, `None` if it may depend on sizes; one that a module has is a constant."""
        return self

    def merges_rows(self, dims: int) -> bool:
        """Whether all dimensions but the last of the first operand and the result count as one, given the second's dimensions."""
        return False

    def narrow_carrier(self, dtype: torch.dtype) -> torch.dtype | None:
        """The only 16-bit carrier allowed for a result of this dtype; float32 if there is none, `None` if any is allowed.

        Any is for matrix products, which sum in float32 whatever their operands are.
        """
        return None

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, how: Arithmetic) -> Tensor:
        """The result, with the bias added."""
        raise NotImplementedError

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, how: Arithmetic) -> Tensor:
        """The gradient of the first operand."""
        raise NotImplementedError

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:
        """The gradient of the second operand."""
        raise NotImplementedError

    def joins(self, first: BackwardOperands, second: BackwardOperands) -> bool:
        """Whether the gradients of both operands come from one operator, if they may."""
        raise NotImplementedError

    def gradients(self, first: BackwardOperands, second: BackwardOperands) -> tuple[Tensor, Tensor]:
        """The gradients of both operands from one operator."""
        raise NotImplementedError

    def grad_bias(self, g: Tensor) -> Tensor:
        """The gradient of the bias, if the operation has one."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class LinearProduct(Product):
    """`a @ w.T`, over the last dimension of `a`, which may have any number of others."""

    sums_rows: ClassVar[bool] = True
    directions: ClassVar[Directions] = directions.LINEAR

    def merges_rows(self, dims: int) -> bool:
        """Tokens are rows, whatever their dimensions."""
        return True

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        if a.dtype == how.dtype and not (how.exact or how.factors or how.adder):
            return F.linear(a, w, bias)
        return multiply(rows(a), w.t(), how, bias).view(*a.shape[:-1], w.shape[0])

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        g = g if g.dim() == 2 else rows(g)
        found = torch.matmul(g, w) if g.dtype == how.dtype and not (how.exact or how.factors or how.adder) else multiply(g, w, how)
        return found if len(a_shape) == 2 else found.view(a_shape)

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        if g.dim() != 2:
            g, a = rows(g), rows(a)
        if g.dtype == how.dtype and not (how.exact or how.factors or how.adder):
            return torch.matmul(g.t(), a)
        return multiply(g.t(), a, how)

    def grad_bias(self, g: Tensor) -> Tensor:  # noqa: D102 (documented above)
        return g.sum(0) if g.dim() == 2 else rows(g).sum(0)


LINEAR = LinearProduct()


def rows(x: Tensor) -> Tensor:
    """All dimensions but the last merged into one; torch does not allow -1 for rows without elements."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@dataclass(frozen=True, eq=False)
class MatmulProduct(Product):
    """`a @ b` of matrices or batches of them, batch dimensions being broadcast."""

    gradient_first: ClassVar[bool] = False
    directions: ClassVar[Directions] = directions.MATMUL

    def merges_rows(self, dims: int) -> bool:
        """Matrices that share their second operand are one."""
        return dims == 2

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
    if b.dim() == 2:
        return multiply(rows(a), b, how).view(*a.shape[:-1], b.shape[-1])
    if how.factors:
        return rescaled(_batched(a, b, how.widened()), how, how.dtype)
    if a.dtype == how.dtype or how.adder is not None:
        return multiply(a, b, how)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    a3 = a.expand(*batch, *a.shape[-2:]).reshape(count, *a.shape[-2:])
    b3 = b.expand(*batch, *b.shape[-2:]).reshape(count, *b.shape[-2:])
    return multiply(a3, b3, how).view(*batch, a.shape[-2], b.shape[-1])


def _summed(a: Tensor, b: Tensor, shape: torch.Size, how: Arithmetic) -> Tensor:
    """A product that is summed over the batches to which its operand was broadcast, before it is rounded to 16 bits."""
    broadcast = shape[:-2] != torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    own = how._replace(dtype=torch.promote_types(how.dtype, torch.float32)) if broadcast else how
    return _batched(a, b, own).sum_to_size(shape).to(how.dtype)
