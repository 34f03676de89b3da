"""A lookup in a table: the product with a matrix of ones and zeros, of which only the indices of the ones are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.nn.product.arithmetic import Arithmetic
from qsim.nn.product.bilinear import Product
from qsim.nn.product.carriers import ProductCarrier, Values


@dataclass(frozen=True)
class Lookup(Product):
    """The rows of a table, rounded forward at the point `weight`, and backward at `grad`; a lookup has no other points.

    Attributes:
        padding_idx: The row that gets no gradient, or -1.
        scale_grad_by_freq: Whether gradients are divided by how often an index occurs.
        skips_negative: Whether negative indices may occur, which have no row here, and get no gradient.
    """

    padding_idx: int
    scale_grad_by_freq: bool = False
    skips_negative: bool = False

    is_lookup: ClassVar[bool] = True
    names: ClassVar[tuple[str, str, str]] = ("the lookup", "no product", "the sum for the table's gradient")

    @property
    def constant(self) -> Any:
        """The attributes."""
        return "lookup", self.padding_idx, self.scale_grad_by_freq, self.skips_negative

    def carrier(self, index: int, one: Values, other: Values, result: torch.dtype, device: torch.device) -> ProductCarrier:
        """The table's own dtype, and at least float32 for gradients."""
        return ProductCarrier(other[1] if index == 0 else torch.promote_types(result, torch.float32))

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        return F.embedding(a.clamp(min=0) if self.skips_negative else a, w)

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:  # noqa: D102 (documented above)
        if how.sum is None:
            rows = torch.ops.aten.embedding_dense_backward(g, a, w_shape[0], self.padding_idx, self.scale_grad_by_freq)
            return rows.to(how.dtype)  # type: ignore[no-any-return]
        index = a.reshape(-1).masked_fill(a.reshape(-1) == self.padding_idx, -1).long()
        given = (w_shape[0], how.seed, how.sum, how.stream, 0, how.dtype)
        return torch.ops.qsim.accumulate_rows.default(g.reshape(-1, g.shape[-1]), index, *given)  # type: ignore[no-any-return]
