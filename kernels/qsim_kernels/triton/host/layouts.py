"""Memory layouts of tensors: which ones kernels process in place, and which are copied into logical order first."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from qsim_kernels.triton.device.parts import TransposedTile
from qsim_kernels.triton.host.launcher import Launch, Launcher

T = TypeVar("T")

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


class ElementOrder(IntEnum):
    """The order in which elements must be counted: any; by their indices; or by these, where the first starts a group of random bits."""

    ANY = 0
    INDEX = 1
    GROUPS = 2


class LaunchLayout(NamedTuple):
    """The way in which programs cover tensors that are stored alike.

    Attributes:
        elements: Number of elements.
        transposed: The transposed matrices, if tensors are stored as such and the elements' indices matter.
        tile: The tile that a program then rounds.
    """

    elements: int
    transposed: Transposed | None = None
    tile: TransposedTile | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The kernels' arguments: elements, and rows and columns of transposed matrices."""
        return self.elements, *(self.transposed or (0, 0))

    def programs(self, share: int) -> int:
        """The number of programs, each of which takes a tile if there is one, and otherwise a share of the elements."""
        if self.transposed is None or self.tile is None:
            return -(-self.elements // share)
        rows, columns = self.transposed
        return self.elements // (rows * columns) * -(-rows // self.tile.rows) * -(-columns // self.tile.columns)


def launch_layout(order: ElementOrder, shape: torch.Size, *strides: tuple[int, ...]) -> LaunchLayout | None:
    """The common layout of tensors of a shape, or none if there is no common one that kernels support.

    Args:
        order: The order of elements.
        shape: The shape.
        *strides: The strides of each tensor.
    """
    count, memory = shape.numel(), memory_of(shape, strides[0])
    if not count:
        return LaunchLayout(0)
    if not memory.is_dense or any(memory_of(shape, other) != memory for other in strides):
        return None
    if order == ElementOrder.ANY or len(memory.steps) < 2:
        return LaunchLayout(count)
    if memory.transposed is None or math.prod(memory.transposed) < _LEAST:
        return None
    return LaunchLayout(count, memory.transposed, tile_of(memory.transposed, order))


@lru_cache(maxsize=4096)
def prepared(
    build: Callable[..., Launcher], form: tuple[Any, ...], order: ElementOrder, shape: torch.Size, *strides: tuple[int, ...]
) -> Launch | None:
    """Prepare a launch on tensors of a shape; none if they need copies in logical order: see `in_order`.

    Args:
        build: The function that makes the launcher, from `form` and the tile of a program.
        form: What the kernel computes: numbers, dtypes, and everything else that it is specialized on.
        order: The order of elements.
        shape: The shape.
        *strides: The strides of each tensor.
    """
    layout = launch_layout(order, shape, *strides)
    if layout is None:
        return None
    run = build(*form, layout.tile)
    return Launch(run, layout.programs(run.share), layout.sizes)


def in_order(run: Callable[..., T], x: Tensor, *outs: Tensor) -> T:
    """Call a function on tensors in logical order, and copy what it writes back into the given ones."""
    targets = [out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device) for out in outs]
    result = run(x.contiguous(), *targets)
    for out, target in zip(outs, targets, strict=True):
        if target is not out:
            out.copy_(target)
    return result


def tile_of(transposed: Transposed, order: ElementOrder) -> TransposedTile:
    """The tile that a program rounds."""
    rows, columns = transposed
    across = min(_ACROSS, triton.next_power_of_2(columns))
    down = max(2 * _RUN, min(_TILE // across, triton.next_power_of_2(rows)))
    is_whole = rows % down == 0 and columns % across == 0
    return TransposedTile(down, across, _RUN, rows % 8 == 0 and order == ElementOrder.GROUPS, columns % 16 == 0, is_whole)
