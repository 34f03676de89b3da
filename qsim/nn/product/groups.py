"""Tensors whose rows fall into groups, and stacks of matrices, one for each group, cut into units that belong to one group each.

The ends of the groups are a tensor, which the host never reads: what follows from them is computed where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim_kernels.numbers.scales import Turn
from qsim_kernels.torch.hadamard import bounded, pieces, signs_on


class Units(NamedTuple):
    """A tensor as units of rows, each of which belongs to one group.

    Attributes:
        values: The units, of shape [units, rows, columns].
        group_count: The number of groups.
        groups: The group of each unit; `group_count` for rows after the last group. `None` in a stack, where every unit is a group.
        places: The row of `values` in which each row of the tensor is; `None` if the rows are those of the tensor.
        filled: The number of rows of each unit that come from the tensor, the first ones; `None` if all do.
    """

    values: Tensor
    group_count: int
    groups: Tensor | None = None
    places: Tensor | None = None
    filled: Tensor | None = None

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
            return of_groups.expand(len(self.values), -1, -1).contiguous()
        return of_groups if self.groups is None else F.pad(of_groups, (0, 0, 0, 0, 0, 1), value=1.0)[self.groups]

    def rows(self, values: Tensor, shape: torch.Size) -> Tensor:
        """The tensor of a shape whose units are given."""
        return values.view(shape) if self.places is None else values.view(-1, shape[-1])[self.places]


#: `groups`, `places` and `filled` of `Units`.
Arrangement = tuple[Tensor, Tensor | None, Tensor | None]


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
            return Units(x, len(x))
        known = self.arrangements.get((len(x), size))
        if known is None:
            known = self.arrangements[len(x), size] = self._arrangement(len(x), size)
        groups, places, filled = known
        if places is None:
            return Units(x.unsqueeze(1), len(self.ends), groups)
        values = x.new_zeros(len(groups) * size, x.shape[1]).index_copy_(0, places, x)
        return Units(values.view(-1, size, x.shape[1]), len(self.ends), groups, places, filled)

    def _arrangement(self, rows: int, size: int) -> Arrangement:
        ends, row = self.ends.to(torch.int64), torch.arange(rows, device=self.ends.device)
        of_rows = torch.searchsorted(ends, row, right=True)
        if size == 1:
            return of_rows, None, None
        starts = F.pad(ends, (1, 0))
        sizes = F.pad(ends, (0, 1), value=rows) - starts
        needed = (sizes + size - 1) // size
        last = needed.cumsum(0)
        number = torch.arange(rows // size + len(ends) + 1, device=ends.device)
        groups = torch.searchsorted(last, number, right=True).clamp(max=len(ends))
        places = row - starts[of_rows] + (last - needed)[of_rows] * size
        filled = (sizes[groups] - (number - (last - needed)[groups]) * size).clamp(0, size)
        return groups, places, filled


def transformed(units: Units, turn: Turn) -> Tensor:
    """The Hadamard transform of each group along its rows, as `hadamard` transforms a tensor with these rows.

    Blocks that a group does not fill are cut into powers of two. Every group has one at most, so all blocks are transformed as whole ones
    first.

    Args:
        units: Units whose rows are whole blocks.
        turn: The transform; its length does not matter.
    """
    columns = units.values.shape[-1]
    blocks = units.values.reshape(-1, turn.size, columns)
    whole = torch.ops.qsim.hadamard.default(blocks, tuple(turn._replace(length=turn.size, inner=columns)))
    assert units.filled is not None
    in_unit = units.values.shape[1] // turn.size
    before = torch.arange(in_unit, device=blocks.device) * turn.size
    filled = (units.filled.view(-1, 1) - before).clamp(0, turn.size).view(-1)
    # The blocks that are not full, or any others in their place: there is room for one for each group, and for the rows after the last one.
    chosen = ((filled == 0) | (filled == turn.size)).to(torch.int8).argsort(stable=True)[: units.group_count + 1]
    cut = torch.ops.qsim.hadamard_of_filled.default(blocks[chosen], filled[chosen], turn.size, turn.signs)
    # In place: a copy would move more bytes than the transform.
    whole.index_copy_(0, chosen, cut)
    return whole.view(units.values.shape)  # type: ignore[no-any-return]


@torch.library.custom_op("qsim::hadamard_of_filled", mutates_args=())
def _hadamard_of_filled(blocks: Tensor, filled: Tensor, size: int, signs: int) -> Tensor:
    """The transform of blocks of which only the first rows are filled, in powers of two.

    Args:
        blocks: Of shape [blocks, size, columns].
        filled: The number of filled rows of each block.
        size: As in `Turn`.
        signs: As in `Turn`.
    """
    turn = Turn(size, 0, 0, signs)
    dtype = torch.promote_types(blocks.dtype, torch.float32)
    found = bounded(blocks.to(dtype), blocks.dtype, turn.size) * signs_on(blocks.device, dtype, turn)
    sizes, factors = (table[filled].unsqueeze(-1) for table in _tables(blocks.device, dtype, turn.size))
    step = 1
    while step < turn.size:
        first, second = found.unflatten(1, (-1, 2, step)).unbind(2)
        joined = torch.stack([first + second, first - second], 2).flatten(1, 3)
        found = torch.where(sizes > step, joined, found)
        step *= 2
    return found * factors


@_hadamard_of_filled.register_fake
def _(blocks: Tensor, filled: Tensor, size: int, signs: int) -> Tensor:
    return blocks.new_empty(blocks.shape, dtype=torch.promote_types(blocks.dtype, torch.float32))


# Cached, because a copy to a device waits for it.
@lru_cache(maxsize=16)
def _tables(device: torch.device, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """By the number of filled rows, for each row of a block: the size of the piece that it is in, and the factor of the transform."""
    sizes = torch.ones(size + 1, size, dtype=torch.int64, device="cpu")
    for filled in range(1, size + 1):
        for start, stop, piece in pieces(Turn(size, filled, 1, -1)):
            sizes[filled, start:stop] = piece
    factors = torch.tensor([[piece**-0.5 for piece in row] for row in sizes.tolist()], dtype=dtype, device="cpu")
    return sizes.to(device), factors.to(device)
