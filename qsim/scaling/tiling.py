"""Scales of parts of a tensor: rows, slices, blocks along a dimension, and tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qsim.formats import Format
from qsim.formats.base import check_integer
from qsim.scaling.base import PerTensor, Rule, Scaling
from qsim.scaling.geometry import check_dim, dim_of, tiles_of_blocks, tiles_of_channels, tiles_of_rows
from qsim_kernels.numbers import scales as numbers


@dataclass(frozen=True, init=False, repr=False)
class PerSlice(Scaling):
    """Base of scalings with one scale per row or slice.

    In a layer both give one scale per row of an operand, along the dimension that its product sums over.
    """


@dataclass(frozen=True, init=False, repr=False)
class PerRow(PerSlice):
    """One scale per row: the elements along a dimension share it, as in torchao's `PerRow`.

    In a layer rows run along the dimension that a product sums over: a scale per token of the input and per output channel of the weight.

    Args:
        dim: The dimension along which elements share a scale.
        format: See `Scaling`.
        rule: See `Scaling`.
        margin: See `Scaling`.
        outer: See `Scaling`.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([[0.1, 0.2, 0.3, 0.4], [10.0, 20.0, 30.0, 40.0]])
        >>> qsim.quantize(x, "e2m1", scale=qsim.scaling.PerRow())
        tensor([[ 0.1000,  0.2000,  0.2667,  0.4000],
                [10.0000, 20.0000, 26.6667, 40.0000]])
    """

    dim: int
    _geometry = ("dim",)
    _sharing = "rows"

    def __init__(
        self,
        dim: int = -1,
        format: str | torch.dtype | Format = "fp32",
        rule: Rule = "fit",
        margin: int = 0,
        outer: PerTensor | str | None = None,
    ) -> None:
        super().__init__(format, rule, margin, outer)
        object.__setattr__(self, "dim", check_dim("PerRow", dim))

    def tiles(self, shape: Sequence[int]) -> numbers.TileSizes:  # noqa: D102 (documented above)
        return tiles_of_rows(self.dim, shape)

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: D102 (documented above)
        dim = dim_of("PerRow", self.dim, shape or (1,))
        return tuple(size if i == dim else 1 for i, size in enumerate(shape))


@dataclass(frozen=True, init=False, repr=False)
class PerAxis(PerSlice):
    """One scale per index along a dimension, for all elements of that slice, as in torchao's `PerAxis`.

    `PerAxis(0)` of a convolution's weight is one scale per output channel; of a batch, one per sample; of a matrix it is the same as
    `PerRow()`.

    Args:
        axis: The dimension that has a scale per index.
        format: See `Scaling`.
        rule: See `Scaling`.
        margin: See `Scaling`.
        outer: See `Scaling`.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([[0.1, 0.2, 0.3, 0.4], [10.0, 20.0, 30.0, 40.0]])
        >>> qsim.quantize(x, "e2m1", scale=qsim.scaling.PerAxis(1))
        tensor([[ 0.,  0.,  0.,  0.],
                [10., 20., 30., 40.]])
    """

    axis: int
    _geometry = ("axis",)
    _sharing = "slices"

    def __init__(
        self,
        axis: int,
        format: str | torch.dtype | Format = "fp32",
        rule: Rule = "fit",
        margin: int = 0,
        outer: PerTensor | str | None = None,
    ) -> None:
        super().__init__(format, rule, margin, outer)
        object.__setattr__(self, "axis", check_dim("PerAxis", axis, "axis"))

    def tiles(self, shape: Sequence[int]) -> numbers.TileSizes:  # noqa: D102 (documented above)
        return tiles_of_channels(self.axis, shape)

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: D102 (documented above)
        axis = dim_of("PerAxis", self.axis, shape)
        return (*shape[:axis], 1, *shape[axis + 1 :])


@dataclass(frozen=True, init=False, repr=False)
class PerBlock(Scaling):
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
        >>> qsim.quantize(torch.tensor([0.1, 0.2, 0.3, 40.0]), "e2m1", scale=qsim.scaling.PerBlock(2))
        tensor([ 0.1000,  0.2000,  0.0000, 40.0000])
    """

    size: int
    dim: int
    _geometry = ("size", "dim")
    _sharing = "blocks"
    _may_draw = True

    def __init__(
        self,
        size: int,
        dim: int = -1,
        format: str | torch.dtype | Format = "fp32",
        rule: Rule = "fit",
        margin: int = 0,
        outer: PerTensor | str | None = None,
    ) -> None:
        super().__init__(format, rule, margin, outer)
        object.__setattr__(self, "size", check_integer("PerBlock", "size", size, 1, 2**31))
        object.__setattr__(self, "dim", check_dim("PerBlock", dim))

    def tiles(self, shape: Sequence[int]) -> numbers.TileSizes:  # noqa: D102 (documented above)
        return tiles_of_blocks(self.size, self.dim, shape)

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: D102 (documented above)
        dim = dim_of("PerBlock", self.dim, shape or (1,))
        return tuple(self.size if i == dim else 1 for i in range(len(shape)))


@dataclass(frozen=True, init=False, repr=False)
class PerTile(Scaling):
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
        >>> qsim.quantize(x, "e2m1", scale=qsim.scaling.PerTile(2, 2))
        tensor([[ 0.0000,  0.0000,  0.0000,  0.0000],
                [10.0000, 20.0000, 26.6667, 40.0000]])
    """

    height: int
    width: int
    _geometry = ("height", "width")
    _sharing = "tiles"
    _may_draw = True

    def __init__(
        self,
        height: int,
        width: int,
        format: str | torch.dtype | Format = "fp32",
        rule: Rule = "fit",
        margin: int = 0,
        outer: PerTensor | str | None = None,
    ) -> None:
        super().__init__(format, rule, margin, outer)
        object.__setattr__(self, "height", check_integer("PerTile", "height", height, 1, 2**31))
        object.__setattr__(self, "width", check_integer("PerTile", "width", width, 1, 2**31))

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
            raise IndexError(f"PerTile: tiles are of matrices, got a tensor of shape {tuple(shape)}")
