"""Tensors whose rows fall into groups, and stacks of matrices, one for each group, cut into units that belong to one group each.

The ends of the groups are a tensor, which the host never reads: what follows from them is computed where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim_kernels.torch.runs import matrices_of, rows_of


class Units(NamedTuple):
    """A tensor as units of rows, each of which belongs to one group.

    Attributes:
        x: The tensor.
        rows: The rows of a unit.
        group_count: The number of groups.
        groups: The group of each unit; `group_count` for rows after the last group. `None` in a stack, where every unit is a group.
        held: The first row of each unit and the number of its rows; `None` if the units are the tensor's rows or matrices.
    """

    x: Tensor
    rows: int
    group_count: int
    groups: Tensor | None = None
    held: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The units, of shape [units, rows, columns], filled up with zeros."""
        return self.x.view(-1, self.rows, self.x.shape[-1]) if self.held is None else matrices_of(self.x, self.held, self.rows)

    @property
    def shape(self) -> torch.Size:
        """The shape of the units."""
        units = self.x.shape[:-1].numel() // self.rows if self.held is None else len(self.held)
        return torch.Size((units, self.rows, self.x.shape[-1]))

    def largest(self, amaxes: Tensor) -> Tensor:
        """The largest of the units' magnitudes in each group; zero in an empty one."""
        if self.groups is None:
            return amaxes
        # Infinity replaces NaN, which torch's reductions do not treat alike on all devices; both make a scale NaN.
        plain = torch.where(amaxes.isnan(), torch.inf, amaxes)
        found = amaxes.new_zeros(self.group_count + 1, *amaxes.shape[1:])
        index = self.groups.view(-1, 1, 1).expand_as(plain)
        return found.scatter_reduce(0, index, plain, "amax")[: self.group_count]

    def spread(self, of_groups: Tensor) -> Tensor:
        """Repeat numbers of groups for each of their units; 1 for units of no group."""
        if len(of_groups) == 1:
            return of_groups.expand(self.shape[0], -1, -1).contiguous()
        return of_groups if self.groups is None else F.pad(of_groups, (0, 0, 0, 0, 0, 1), value=1.0)[self.groups]

    def joined(self, values: Tensor) -> Tensor:
        """The tensor whose units are given."""
        return values.view(self.x.shape) if self.held is None else rows_of(values, self.held, len(self.x))


#: `groups` and `held` of `Units`.
Arrangement = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Groups:
    """Which rows belong to which group, in one pass of a product.

    Attributes:
        ends: For each group, the row after its last one.
    """

    ends: Tensor
    #: The arrangements so far, by the number of rows and the size of a unit.
    arrangements: dict[tuple[int, int], Arrangement] = field(default_factory=dict, compare=False, repr=False)

    def units(self, x: Tensor, size: int) -> Units:
        """The units of a tensor: the matrices of a stack, or `size` rows each."""
        if x.dim() == 3:
            return Units(x, x.shape[1], len(x))
        known = self.arrangements.get((len(x), size))
        if known is None:
            known = self.arrangements[len(x), size] = self._arrangement(len(x), size)
        return Units(x, size, len(self.ends), *known)

    def _arrangement(self, rows: int, size: int) -> Arrangement:
        ends = self.ends.to(torch.int64)
        if size == 1:
            return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True), None
        starts = F.pad(ends, (1, 0))
        sizes = F.pad(ends, (0, 1), value=rows) - starts
        needed = (sizes + size - 1) // size
        last = needed.cumsum(0)
        number = torch.arange(rows // size + len(ends) + 1, device=ends.device)
        groups = torch.searchsorted(last, number, right=True).clamp(max=len(ends))
        before = (number - (last - needed)[groups]) * size
        return groups, torch.stack([starts[groups] + before, (sizes[groups] - before).clamp(0, size)], 1).to(torch.int32)
