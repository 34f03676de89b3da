"""How tensors lie in memory: which of them kernels take as they lie, and which are put into logical order first."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim_kernels.triton.launcher import Launcher
from qsim_kernels.triton.transposed import Tile

#: Elements of a tile, and how many of them lie side by side in memory where there are so many.
_TILE, _ACROSS = 2048, 64
#: How many neighbours in logical order a thread makes random bits for.
_RUN = 8
#: Smaller matrices would leave most of a program's threads idle, and are copied.
_LEAST = 256


class Transposed(NamedTuple):
    """Matrices, one behind the other, that are stored transposed, as images are whose channels come last.

    Attributes:
        rows: In memory; their elements of one column are neighbours in logical order.
        columns: In memory.
    """

    rows: int
    columns: int


class Memory(NamedTuple):
    """What a tensor's elements are in memory.

    Attributes:
        steps: Size and stride of its dimensions in logical order; those that are one in memory are one here.
        is_dense: Whether they fill their memory, each place once.
        transposed: What it is, if it is that.
    """

    steps: tuple[tuple[int, int], ...]
    is_dense: bool
    transposed: Transposed | None


@lru_cache(maxsize=4096)
def memory_of(shape: torch.Size, strides: tuple[int, ...]) -> Memory:
    """How a tensor of this shape and these strides lies in memory."""
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
    """What a kernel reads and writes instead of the tensors that it was given.

    Attributes:
        source: Is read.
        target: Is written.
        others: Are written too.
        transposed: What all of these are, if they are, and it matters which element is which.
        tile: Of which a program then rounds one.
    """

    source: Tensor
    target: Tensor
    others: tuple[Tensor, ...]
    transposed: Transposed | None = None
    tile: Tile | None = None

    def launch(self, launcher: Launcher, count: int, *arguments: Any, absent: Hashable) -> None:
        """Launches a kernel with as many programs as share `count` elements."""
        if self.transposed is None or self.tile is None:
            launcher(self.source, self.target, count, 0, 0, *arguments, absent=absent)
            return
        rows, columns = self.transposed
        programs = count // (rows * columns) * -(-rows // self.tile.rows) * -(-columns // self.tile.columns)
        launcher.launch(programs, self.source, self.target, count, rows, columns, *arguments, absent=absent)

    def finish(self, *outs: Tensor) -> None:
        """Puts what was written elsewhere into the tensors that were given."""
        for out, target in zip(outs, (self.target, *self.others), strict=True):
            if target is not out:
                out.copy_(target)


def work_on(by_index: bool, aligned: bool, x: Tensor, out: Tensor, *others: Tensor) -> Work:
    """How a kernel gets its tensors: as they lie in memory where it can take them so, in logical order otherwise.

    Args:
        by_index: Whether what becomes of an element depends on its index; otherwise any order will do.
        aligned: Whether the first element is one for which random bits begin.
        x: What is read.
        out: What is written.
        *others: What is written too.
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
    """The tile of which a program rounds one, where the first element is one for which random bits begin, or is not."""
    rows, columns = transposed
    across = min(_ACROSS, _power_from(columns))
    down = max(2 * _RUN, min(_TILE // across, _power_from(rows)))
    is_whole = rows % down == 0 and columns % across == 0
    return Tile(down, across, _RUN, rows % 8 == 0 and aligned, columns % 16 == 0, is_whole)


def _power_from(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def flat(x: Tensor) -> Tensor:
    """The elements in logical order."""
    return x if x.is_contiguous() else x.contiguous()


def _target(out: Tensor) -> Tensor:
    """Where to write the elements in logical order."""
    return out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
