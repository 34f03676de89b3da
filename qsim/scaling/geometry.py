"""Which elements of a tensor share a scale, as `qsim_kernels.numbers.scales.TileSizes`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qsim.formats.base import check_integer
from qsim_kernels.numbers import scales as numbers


def tiles_of_whole(shape: Sequence[int]) -> numbers.TileSizes:
    """The single tile of `PerTensor()`."""
    count = math.prod(shape)
    return numbers.TileSizes(1, count, 1, max(count, 1), False)


def tiles_of_channels(dim: int, shape: Sequence[int]) -> numbers.TileSizes:
    """The tiles of `PerAxis(dim)`."""
    dim = dim_of("PerAxis", dim, shape)
    inner = math.prod(shape[dim + 1 :])
    return numbers.TileSizes(shape[dim], inner, 1, max(inner, 1), True)


def tiles_of_rows(dim: int, shape: Sequence[int]) -> numbers.TileSizes:
    """The tiles of `PerRow(dim)`."""
    shape = shape or (1,)
    dim = dim_of("PerRow", dim, shape)
    return tiles_of_blocks(max(shape[dim], 1), dim, shape)


def tiles_of_blocks(size: int, dim: int, shape: Sequence[int]) -> numbers.TileSizes:
    """The tiles of `PerBlock(size, dim)`."""
    shape = shape or (1,)
    dim = dim_of("PerBlock", dim, shape)
    inner = math.prod(shape[dim + 1 :])
    if dim == len(shape) - 1:
        return numbers.TileSizes(1, shape[dim], 1, size, False)
    return numbers.TileSizes(shape[dim], inner, size, 1, False)


def check_dim(owner: str, dim: object, name: str = "dim") -> int:
    """Raise an error for a value that cannot be a dimension of any tensor."""
    return check_integer(owner, name, dim, -64, 63)


def dim_of(owner: str, dim: int, shape: Sequence[int]) -> int:
    """A dimension of a shape, counted from its beginning."""
    if not -len(shape) <= dim < len(shape):
        raise IndexError(f"{owner}: there is no dimension {dim} in a tensor of shape {tuple(shape)}")
    return dim % len(shape)
