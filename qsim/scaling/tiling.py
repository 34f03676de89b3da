"""Scales of parts of a tensor: channels, blocks along a dimension, and tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qsim.formats import Format
from qsim.formats.base import check_integer
from qsim.scaling.base import Rule, Scaling, Tensor
from qsim.scaling.geometry import check_dim, dim_of, tiles_of_blocks, tiles_of_channels
from qsim_kernels.numbers import scales as numbers


@dataclass(frozen=True, init=False, repr=False)
class Channel(Scaling):
    """One scale per index along a dimension: with `dim=0`, per row of a matrix.

    Args:
        dim: The dimension.
        format: See `Scaling`.
        rule: See `Scaling`.
        margin: See `Scaling`.
        outer: See `Scaling`.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([[0.1, 0.2, 0.3, 0.4], [10.0, 20.0, 30.0, 40.0]])
        >>> qsim.quantize(x, "e2m1", scale=qsim.scaling.Channel(0))
        tensor([[ 0.1000,  0.2000,  0.2667,  0.4000],
                [10.0000, 20.0000, 26.6667, 40.0000]])
    """

    dim: int
    _geometry = ("dim",)

    def __init__(
        self, dim: int, format: str | torch.dtype | Format = "fp32", rule: Rule = "fit", margin: int = 0, outer: Tensor | str | None = None
    ) -> None:
        super().__init__(format, rule, margin, outer)
        object.__setattr__(self, "dim", check_dim("Channel", dim))

    def tiles(self, shape: Sequence[int]) -> numbers.TileSizes:  # noqa: D102 (documented above)
        return tiles_of_channels(self.dim, shape)

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: D102 (documented above)
        dim = dim_of("Channel", self.dim, shape)
        return (*shape[:dim], 1, *shape[dim + 1 :])


@dataclass(frozen=True, init=False, repr=False)
class Blocks(Scaling):
    """One scale per block of `size` neighbours along a dimension; the last block may be shorter.

    Args:
        size: Number of elements in a block.
        dim: The dimension.
        format: See `Scaling`.
        rule: See `Scaling`.
        margin: See `Scaling`.
        outer: See `Scaling`.

    Example:
        >>> import torch, qsim
        >>> qsim.quantize(torch.tensor([0.1, 0.2, 0.3, 40.0]), "e2m1", scale=qsim.scaling.Blocks(2))
        tensor([ 0.1000,  0.2000,  0.0000, 40.0000])
    """

    size: int
    dim: int
    _geometry = ("size", "dim")

    def __init__(
        self,
        size: int,
        dim: int = -1,
        format: str | torch.dtype | Format = "fp32",
        rule: Rule = "fit",
        margin: int = 0,
        outer: Tensor | str | None = None,
    ) -> None:
        super().__init__(format, rule, margin, outer)
        object.__setattr__(self, "size", check_integer("Blocks", "size", size, 1, 2**31))
        object.__setattr__(self, "dim", check_dim("Blocks", dim))

    def tiles(self, shape: Sequence[int]) -> numbers.TileSizes:  # noqa: D102 (documented above)
        return tiles_of_blocks(self.size, self.dim, shape)

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: D102 (documented above)
        dim = dim_of("Blocks", self.dim, shape or (1,))
        return tuple(self.size if i == dim else 1 for i in range(len(shape)))


@dataclass(frozen=True, init=False, repr=False)
class Tiles(Scaling):
    """One scale per tile of the matrices in the last two dimensions; tiles at the edges may be smaller.

    Args:
        height: Rows of a tile.
        width: Columns of a tile.
        format: See `Scaling`.
        rule: See `Scaling`.
        margin: See `Scaling`.
        outer: See `Scaling`.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([[0.1, 0.2, 0.3, 0.4], [10.0, 20.0, 30.0, 40.0]])
        >>> qsim.quantize(x, "e2m1", scale=qsim.scaling.Tiles(2, 2))
        tensor([[ 0.0000,  0.0000,  0.0000,  0.0000],
                [10.0000, 20.0000, 26.6667, 40.0000]])
    """

    height: int
    width: int
    _geometry = ("height", "width")

    def __init__(
        self,
        height: int,
        width: int,
        format: str | torch.dtype | Format = "fp32",
        rule: Rule = "fit",
        margin: int = 0,
        outer: Tensor | str | None = None,
    ) -> None:
        super().__init__(format, rule, margin, outer)
        object.__setattr__(self, "height", check_integer("Tiles", "height", height, 1, 2**31))
        object.__setattr__(self, "width", check_integer("Tiles", "width", width, 1, 2**31))

    @property
    def is_directed(self) -> bool:  # noqa: D102 (documented above)
        return self.height != self.width

    def tiles(self, shape: Sequence[int]) -> numbers.TileSizes:  # noqa: D102 (documented above)
        self._check_matrices(shape)
        return numbers.TileSizes(shape[-2], shape[-1], self.height, self.width, False)

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: D102 (documented above)
        self._check_matrices(shape)
        return (*(1 for _ in shape[:-2]), self.height, self.width)

    def _check_matrices(self, shape: Sequence[int]) -> None:
        if len(shape) < 2:
            raise IndexError(f"Tiles: tiles are of matrices, got a tensor of shape {tuple(shape)}")
