"""Memory layouts of tensors: which ones kernels process in place, and which are copied into logical order first."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim_kernels.triton.device.transposed import Tile
from qsim_kernels.triton.host.launcher import Launcher

#: Elements of a tile, and how many of them are adjacent in memory if there are that many.
_TILE, _ACROSS = 2048, 64
#: Number of neighbours in logical order that a thread makes random bits for.
_RUN = 8
#: Smaller matrices would leave most of a program's threads idle, and are copied.
_LEAST = 256


class Transposed(NamedTuple):
    """Consecutive matrices that are stored transposed, such as channels-last images.

    Attributes:
        rows: Rows in memory; their elements in one column are neighbours in logical order.
        columns: Columns in memory.
    """

    rows: int
    columns: int


class Memory(NamedTuple):
    """The memory layout of a tensor's elements.

    Attributes:
        steps: Size and stride of its dimensions in logical order; dimensions that are contiguous in memory are merged.
        is_dense: Whether they fill their memory, each location once.
        transposed: The transposed matrices, if it is stored as such.
    """

    steps: tuple[tuple[int, int], ...]
    is_dense: bool
    transposed: Transposed | None


@lru_cache(maxsize=4096)
def memory_of(shape: torch.Size, strides: tuple[int, ...]) -> Memory:
    """The memory layout of a tensor with the given shape and strides."""
    steps: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if steps and steps[-1][1] == size * stride:
            steps[-1] = steps[-1][0] * size, stride
        elif size != 1:
            steps.append((size, stride))
    filled, is_dense = 1, True
    for size, stride in sorted(steps, key=lambda step: step[1]):
        is_dense = is_dense and stride == filled
        filled *= size
    transposed = None
    if is_dense and len(steps) in (2, 3):
        (columns, between), (rows, along) = steps[-2:]
        if (between, along) == (1, columns):
            transposed = Transposed(rows, columns)
    return Memory(tuple(steps), is_dense, transposed)


class Work(NamedTuple):
    """The tensors that a kernel reads and writes in place of the given ones.

    Attributes:
        source: The tensor that is read.
        target: The tensor that is written.
        others: Further tensors that are written.
        transposed: Their common transposed layout, if they have one and the elements' indices matter.
        tile: The tile that a program then rounds.
    """

    source: Tensor
    target: Tensor
    others: tuple[Tensor, ...]
    transposed: Transposed | None = None
    tile: Tile | None = None

    def launch(self, launcher: Launcher, count: int, *arguments: Any, absent: Hashable) -> None:
        """Launch a kernel with as many programs as share `count` elements."""
        if self.transposed is None or self.tile is None:
            launcher(self.source, self.target, count, 0, 0, *arguments, absent=absent)
            return
        rows, columns = self.transposed
        programs = count // (rows * columns) * -(-rows // self.tile.rows) * -(-columns // self.tile.columns)
        launcher.launch(programs, self.source, self.target, count, rows, columns, *arguments, absent=absent)

    def finish(self, *outs: Tensor) -> None:
        """Copy results written elsewhere into the given tensors."""
        for out, target in zip(outs, (self.target, *self.others), strict=True):
            if target is not out:
                out.copy_(target)


def work_on(by_index: bool, aligned: bool, x: Tensor, out: Tensor, *others: Tensor) -> Work:
    """Arrange tensors for a kernel: in place where it can process their memory layout, in logical order otherwise.

    Args:
        by_index: Whether results depend on an element's index; otherwise any order will do.
        aligned: Whether the first element starts a group of random bits.
        x: The tensor that is read.
        out: The tensor that is written.
        *others: Further tensors that are written.
    """
    outs = (out, *others)
    if x.is_contiguous() and all(map(Tensor.is_contiguous, outs)):
        return Work(x, out, others)
    memory = memory_of(x.shape, x.stride())
    if memory.is_dense and all(memory_of(written.shape, written.stride()) == memory for written in outs):
        if not by_index:
            return Work(x, out, others)
        if memory.transposed is not None and math.prod(memory.transposed) >= _LEAST:
            return Work(x, out, others, memory.transposed, tile_of(memory.transposed, aligned))
    return Work(flat(x), _target(out), tuple(map(_target, others)))


@lru_cache(maxsize=4096)
def tile_of(transposed: Transposed, aligned: bool) -> Tile:
    """The tile that a program rounds, depending on whether the first element starts a group of random bits."""
    rows, columns = transposed
    across = min(_ACROSS, _power_from(columns))
    down = max(2 * _RUN, min(_TILE // across, _power_from(rows)))
    is_whole = rows % down == 0 and columns % across == 0
    return Tile(down, across, _RUN, rows % 8 == 0 and aligned, columns % 16 == 0, is_whole)


def _power_from(size: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def flat(x: Tensor) -> Tensor:
    """The elements in logical order."""
    return x if x.is_contiguous() else x.contiguous()


def _target(out: Tensor) -> Tensor:
    """A tensor to write the elements to in logical order."""
    return out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
