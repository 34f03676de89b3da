"""Matrices that are runs of a tensor's rows, in plain torch: Hadamard transforms along them, largest magnitudes, rounding under scales.

`held` has the first row of each matrix in the tensor and the number of its rows, at most those of `TileSizes`. Every row of the tensor is
in one matrix. Random bits are those of matrices that follow each other and have all of their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.numbers.scales import ScaledRounding, Scales, TileSizes, Turn
from qsim_kernels.torch.hadamard import bounded, pieces, signs_on

#: A function that transforms as `torch.hadamard` does.
Transform = Callable[[Tensor, Turn], Tensor]


def places_of(held: Tensor, size: int, rows: int) -> Tensor:
    """The row of matrices of a number of rows in which each of a tensor's rows is."""
    row = torch.arange(size, device=held.device)
    # Those that do not exist get a place of their own.
    own = torch.where(row < held[:, 1:], held[:, :1] + row, rows).view(-1)
    return own.new_zeros(rows + 1).scatter_(0, own, torch.arange(len(own), device=held.device))[:rows]


def matrices_of(x: Tensor, held: Tensor, size: int) -> Tensor:
    """The matrices, filled up with zeros."""
    places = places_of(held, size, len(x))
    return x.new_zeros(len(held) * size, x.shape[1]).index_copy_(0, places, x).view(-1, size, x.shape[1])


def rows_of(matrices: Tensor, held: Tensor, rows: int) -> Tensor:
    """The rows of the tensor with such matrices."""
    return matrices.reshape(-1, matrices.shape[2])[places_of(held, matrices.shape[1], rows)]


def hadamard_of_runs(x: Tensor, held: Tensor, size: int, turn: Turn | None, transform: Transform) -> Tensor:
    """The matrices, of `size` rows, after a transform along rows or columns, if there is one.

    A block that a matrix does not fill is cut into powers of two. No more of them may be than there are more matrices than full ones could
    be; all blocks are transformed as whole ones first.
    """
    matrices = matrices_of(x, held, size)
    if turn is None or not x.numel():
        return matrices
    columns = x.shape[1]
    if (turn.length, turn.inner) != (size, columns):
        return transform(matrices, turn)
    blocks = matrices.view(-1, turn.size, columns)
    whole = transform(blocks, turn._replace(length=turn.size, inner=columns))
    before = torch.arange(size // turn.size, device=x.device) * turn.size
    filled = (held[:, 1:] - before).clamp(0, turn.size).view(-1)
    # The blocks that are not full, or any others in their place.
    most = len(held) - len(x) // size
    chosen = ((filled == 0) | (filled == turn.size)).to(torch.int8).argsort(stable=True)[:most]
    # In place: a copy would move more bytes than the transform.
    return whole.index_copy_(0, chosen, _cut(blocks[chosen], filled[chosen], turn)).view(matrices.shape)


def quantize_runs_into(
    out: Tensor,
    x: Tensor,
    held: Tensor,
    under: Tensor | None,
    making: Scales,
    rounding: ScaledRounding,
    transform: Transform,
    quantize_tiles: Callable[..., None],
) -> None:
    """Round the matrices under the scales of their tiles, as `quantize_tiles_into` does, and write their rows."""
    if not x.numel():
        return
    values = hadamard_of_runs(x, held, rounding.tiles.rows, rounding.turn, transform)
    rounded = torch.empty(values.shape, dtype=out.dtype, device=out.device)
    quantize_tiles(rounded, None, values, under, making, rounding._replace(turn=None))
    out.copy_(rows_of(rounded, held, len(x)))


def amaxes_of_runs_into(
    out: Tensor,
    x: Tensor,
    held: Tensor,
    tiles: TileSizes,
    turn: Turn | None,
    finite: bool,
    transform: Transform,
    largest: Callable[..., None],
) -> None:
    """Write the largest magnitude of each of the matrices' tiles, as `amaxes_into` does."""
    largest(out, hadamard_of_runs(x, held, tiles.rows, turn, transform), tiles, None, finite)


def _cut(blocks: Tensor, filled: Tensor, turn: Turn) -> Tensor:
    """The transform of blocks of which only the first rows are filled, in powers of two."""
    dtype = torch.promote_types(blocks.dtype, torch.float32)
    found = bounded(blocks.to(dtype), blocks.dtype, turn.size) * signs_on(blocks.device, dtype, turn._replace(length=0, inner=0))
    sizes, factors = (table[filled].unsqueeze(-1) for table in _tables(blocks.device, dtype, turn.size))
    step = 1
    while step < turn.size:
        first, second = found.unflatten(1, (-1, 2, step)).unbind(2)
        joined = torch.stack([first + second, first - second], 2).flatten(1, 3)
        found = torch.where(sizes > step, joined, found)
        step *= 2
    return found * factors


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
