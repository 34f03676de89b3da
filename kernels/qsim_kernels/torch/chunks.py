"""Parts of tensors: pieces in logical order, whatever the strides, that stay in the CPU cache, and the tiles of matrices."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional as F

from qsim_kernels.numbers.scales import TileSizes

#: Elements in a piece: its temporaries fit the caches, and its blocks of random words, a quarter as many, still exceed the 2**15 that
#: torch gives to one thread.
CHUNK = 3 << 16


def pieces(*tensors: Tensor, first: int = 0) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Cut tensors of one shape into corresponding pieces of at most `CHUNK` elements.

    Args:
        *tensors: Tensors of one shape, with any strides.
        first: Logical index of the first element.

    Yields:
        The logical index of a piece's first element, and the tensors' views of it.
    """
    if all(t.is_contiguous() for t in tensors):
        tensors = tuple(t.view(-1) for t in tensors)
    yield from _cut(tensors, first)


def _cut(tensors: tuple[Tensor, ...], first: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    shape = tensors[0].shape
    total = tensors[0].numel()
    if total <= CHUNK:
        if total:
            yield first, tensors
        return
    row = total // shape[0]
    if row > CHUNK:
        for i in range(shape[0]):
            yield from _cut(tuple(t[i] for t in tensors), first + i * row)
        return
    rows = CHUNK // row
    for i in range(0, shape[0], rows):
        yield first + i * row, tuple(t[i : i + rows] for t in tensors)


def in_tiles(matrices: Tensor, tiles: TileSizes) -> Tensor:
    """Matrices, padded with zeros, as tiles: matrix, tile down, row in it, tile along, column in it."""
    rows, columns, height, width, _ = tiles
    padded = F.pad(matrices, (0, -columns % width, 0, -rows % height))
    return padded.view(-1, padded.shape[1] // height, height, padded.shape[2] // width, width)
