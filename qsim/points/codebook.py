"""Values from a table, given or learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from qsim import formats
from qsim.formats.base import check_flag
from qsim.functional import quantize
from qsim.points.base import PointModule, surrogate, wide
from qsim.points.groups import check_granularity, grouped, ungrouped, within
from qsim.scaling import Scaling

#: NormalFloat with 4 bits: QLoRA, arXiv 2305.14314, appendix E. Use it with one scale per 64 values: `PerBlock(64)`.
NF4: tuple[float, ...] = formats.NF4.values()


class Codebook(PointModule):
    """Rounding to the nearest value of a table; a value halfway between two goes to the smaller one.

    With a granularity, the values of each group are scaled so that the largest magnitude becomes that of the table. The gradient of a value
    is straight through. A learned table is a parameter: each of its values gets the sum of the gradients of the elements rounded to it,
    times their scales; its order does not matter.

    Args:
        table: The values: numbers or a one-dimensional tensor.
        granularity: Which elements share a scale: `PerTensor()`, `PerRow()`, `PerAxis(axis)`, `PerBlock(size, dim)` or
            `PerTile(height, width)` of `qsim.scaling`; `None` for no scales.
        learned: Make the table a parameter.

    Example:
        >>> import torch, qsim
        >>> qsim.points.Codebook([-4.0, -1.0, 0.0, 1.0, 4.0])(torch.tensor([0.4, 0.6, -9.0, 2.5]))
        tensor([ 0.,  1., -4.,  1.])
        >>> nf4 = qsim.points.Codebook(qsim.points.NF4, qsim.scaling.PerBlock(64))
        >>> nf4(torch.tensor([0.1, -2.0, 0.5]))
        tensor([ 0.1592, -2.0000,  0.4922])
    """

    table: Tensor

    def __init__(self, table: Sequence[float] | Tensor, granularity: Scaling | str | None = None, *, learned: bool = False) -> None:
        super().__init__()
        check_flag("Codebook", "learned", learned)
        values = table.tolist() if isinstance(table, Tensor) else list(table)
        if not values or not all(isinstance(value, Real) and math.isfinite(value) for value in values):
            raise ValueError(f"Codebook: table must be a list of finite numbers, got {table!r}")
        self.values = tuple(map(float, values))
        self.granularity = None if granularity is None else check_granularity("Codebook", granularity)
        if granularity is not None and not any(self.values):
            raise ValueError("Codebook: a table of zeros cannot have scales: leave granularity out")
        self.gradient = "own" if learned else "straight"
        dtype = table.dtype if isinstance(table, Tensor) and table.is_floating_point() else torch.float32
        empty = torch.empty(len(values), dtype=dtype)
        if learned:
            self.table = nn.Parameter(empty)
        else:
            self.register_buffer("table", empty)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Return to the given table."""
        self.table.copy_(self.table.new_tensor(self.values))

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Replace every element by the nearest value of the table."""
        values = wide(x)
        table = self.table.to(values.dtype).sort().values
        if self.granularity is None:
            return surrogate(values, _nearest(values.detach(), table)).to(x.dtype)
        groups = grouped(values, self.granularity)
        scale = (groups.detach().abs().amax(within(groups), keepdim=True) / table.detach().abs().max()).to(values.dtype)
        scale = torch.where(scale > 0, scale, 1.0)
        nearest = _nearest(groups.detach() / scale, table) * scale
        return ungrouped(surrogate(groups, nearest), x.shape).to(x.dtype)

    def extra_repr(self) -> str:
        """The size of the table and the groups."""
        groups = "" if self.granularity is None else f", {self.granularity}"
        return f"{self.table.numel()} values{groups}" + (", learned" if isinstance(self.table, nn.Parameter) else "")


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """The nearest value of a sorted table, as a differentiable function of the table."""
    middle = (table[1:].detach().double() + table[:-1].detach().double()) / 2
    # Rounded down, so that a float32 number beyond the exact middle is beyond the rounded one, too.
    limits = middle if x.dtype == torch.float64 else quantize(middle, "fp32", "down", dtype=torch.float32)
    return torch.where(x.isnan(), x, table[torch.bucketize(x.contiguous(), limits)])
