"""Products of rows in groups, each of which has its own matrix, as in a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qsim.nn.product import directions
from qsim.nn.product.arithmetic import Arithmetic, in_dtype, multiply, rescaled
from qsim.nn.product.directions import Directions
from qsim_kernels.ops.direct import DISPATCHED


@dataclass(frozen=True, eq=False)
class GroupedProduct:
    """`a[start:end] @ w[i]` for each group. The ends of the groups are a tensor, which the host does not read where torch multiplies.

    As in torch's function, rows after the last group are undefined, in the result and in the gradient of the first operand.
    """

    gradient_first: ClassVar[bool] = False
    sums_rows: ClassVar[bool] = False
    directions: ClassVar[Directions] = directions.MATMUL

    def merges_rows(self, dims: int) -> bool:
        """Every group has its own rows."""
        return False

    def narrow_carrier(self, dtype: torch.dtype) -> torch.dtype | None:
        """Torch's grouped products round their results to their operands' dtype."""
        return dtype if dtype.itemsize == 2 else torch.float32

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, how: Arithmetic) -> Tensor:
        """The result; there is no bias."""
        return _of_groups(a, w, how)

    def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, how: Arithmetic) -> Tensor:
        """The gradient of the first operand."""
        return _of_groups(g, w.mT, how)

    def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:
        """The gradient of the second operand."""
        return _of_groups(a.t(), g, how)

    def grad_bias(self, g: Tensor) -> Tensor:
        """There is none."""
        raise NotImplementedError


GROUPED = GroupedProduct()


def _of_groups(a: Tensor, b: Tensor, how: Arithmetic) -> Tensor:
    """The products of the groups: of rows of `a` with a matrix each, or of columns of `a` with rows of `b`."""
    assert how.groups is not None
    if a.dtype == torch.bfloat16 and not how.factors:
        return in_dtype(torch._grouped_mm(a, b, offs=how.groups), how.dtype)
    product = torch.ops.qsim.grouped_matmul.default(a, b, how.groups, how.exact)
    return rescaled(product, how, how.dtype) if how.factors else in_dtype(product, how.dtype)


@torch.library.custom_op("qsim::grouped_matmul", mutates_args=())
def _grouped_matmul(a: Tensor, b: Tensor, ends: Tensor, exact: bool) -> Tensor:
    """Grouped products in at least float32, which torch's own do not give for 16-bit operands, nor compiled for others.

    The host reads the ends of the groups, which costs nothing on a CPU. Rows after the last group are zero.
    """
    how = Arithmetic(torch.promote_types(a.dtype, torch.float32), DISPATCHED, exact)
    last = ends.tolist()
    spans = list(zip([0, *last[:-1]], last, strict=True))
    if b.dim() == 2:
        return torch.stack([multiply(a[:, start:end], b[start:end], how) for start, end in spans])
    result = a.new_zeros(a.shape[0], b.shape[-1], dtype=how.dtype)
    for (start, end), matrix in zip(spans, b, strict=True):
        result[start:end] = multiply(a[start:end], matrix, how)
    return result


@_grouped_matmul.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor, exact: bool) -> Tensor:
    groups = ends.shape if b.dim() == 2 else ()
    return a.new_empty(*groups, a.shape[0], b.shape[-1], dtype=torch.promote_types(a.dtype, torch.float32))
