"""The matrices of a call, the size of a program's tile, and what every launch of it needs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim_kernels.meanings.triton import INTERPRETED
from qsim_kernels.numbers.sums import PromotedSum, Sum, noise_indices
from qsim_kernels.triton.accumulate.planes import Planes
from qsim_kernels.triton.host.seeds import seed_of


class ResultTile(NamedTuple):
    """The size of a program's tile, and its warps."""

    rows: int
    columns: int
    warps: int


class AccumulateCall(NamedTuple):
    """The matrices of one call, three-dimensional, their scales along the sum if they have some, and the source of random bits."""

    out: Tensor
    a: Tensor
    b: Tensor
    scales: tuple[Tensor, Tensor] | None
    seed: Tensor | None
    stream: int
    offset: int
    tile: ResultTile | None

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return self.out.shape[1]

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.out.shape[2]

    @property
    def length(self) -> int:
        """Products in a sum."""
        return self.a.shape[2]

    def room(self, a: Planes, b: Planes) -> Tensor:
        """Room for the result with the padding of the operands' planes."""
        if (self.rows, self.columns) == (a.rows, b.rows):
            return self.out
        return self.out.new_empty((self.out.shape[0], a.rows, b.rows))

    def finish(self, room: Tensor) -> None:
        """Copy the result from the room that `room` has given."""
        if room is not self.out:
            self.out.copy_(room[:, : self.rows, : self.columns])

    def programs(self, tile: ResultTile) -> tuple[int, int, int]:
        """The number of tiles along each dimension."""
        return -(-self.rows // tile.rows), -(-self.columns // tile.columns), self.out.shape[0]

    def noise(self, how: Sum) -> tuple[Any, ...]:
        """The kernels' arguments from the seed to the stride of a short sum."""
        pointer, number = seed_of(self.seed, self.a)
        inner = noise_indices(how.inner, how.every) if isinstance(how, PromotedSum) else 0
        return pointer, number, self.stream, self.offset, noise_indices(how, self.length), inner


def has_dpx() -> bool:
    """Whether the GPU adds and compares 16-bit pairs."""
    return not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)


def options(warps: int) -> dict[str, int]:
    """The launch options for so many warps."""
    return {} if INTERPRETED else {"num_warps": warps}
