"""The dimensions along which the operands of a layer's three products are scaled, and the place of channel scales in the result.

Forward `Y = A W`, backward `∇A = ∇Y W` and `∇W = ∇Y A`: each of the six operands has a dimension over which its product sums, used for
blocks and transforms, and one that stays a dimension of the result, used for channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qsim.scaling import PerBlock, PerTile, Scaling
from qsim.scaling.geometry import tiles_of_blocks, tiles_of_channels
from qsim.scaling.tiling import PerSlice
from qsim_kernels.numbers import scales as numbers
from qsim_kernels.torch.scaled_sums import ChainScales


@dataclass(frozen=True)
class Direction:
    """The dimensions of an operand in a product of tensors whose first two dimensions are samples and channels, as in convolutions.

    Attributes:
        summed: The dimension that the product sums over.
        kept: The dimension that it keeps.
        result: The dimension of the result that this becomes.
    """

    summed: int
    kept: int
    result: int

    def tiles(self, scaling: Scaling, shape: Sequence[int]) -> numbers.TileSizes:
        """Which elements of an operand share a scale."""
        if isinstance(scaling, PerBlock):
            return tiles_of_blocks(scaling.size, self.summed, shape)
        if isinstance(scaling, PerSlice):
            return self._channels(shape)
        return scaling.tiles(self._matrix(shape) if isinstance(scaling, PerTile) else shape)

    def spread(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """The scales of an operand's channels, or its single scale, shaped for multiplication with the result."""
        if scales.numel() <= 1:
            return scales.view(()) if scales.numel() else scales.sum()  # an empty tensor has no scales
        return scales.view([-1 if dim == self.result else 1 for dim in range(len(shape))])

    def step(self, scaling: Scaling) -> int:
        """The number of neighbours along the sum that share a scale of blocks or tiles; 0 where short sums cannot have scales."""
        return 0

    def chains(self, scales: Tensor, tiles: numbers.TileSizes, shape: Sequence[int], chain: int) -> ChainScales:
        """The scales of blocks or tiles of a tensor of a shape for short sums of `chain` products."""
        raise NotImplementedError

    def summed_dims(self, dims: int, merges: bool) -> Sequence[int]:
        """The dimensions summed over as one, for an operand with `dims` dimensions."""
        return (self.summed,)

    def channel_dims(self, dims: int, merges: bool) -> Sequence[int]:
        """The dimensions along which the elements of a channel extend."""
        return [dim for dim in range(dims) if dim != self.kept]

    def matrix_dims(self, dims: int, merges: bool) -> tuple[Sequence[int], Sequence[int]]:
        """The dimensions that form the rows, and those that form the columns, of the operand as a matrix."""
        return [0], range(1, dims)

    def _channels(self, shape: Sequence[int]) -> numbers.TileSizes:
        return tiles_of_channels(self.kept, shape)

    def _matrix(self, shape: Sequence[int]) -> Sequence[int]:
        """An operand viewed as the matrix that it is in memory."""
        return shape[0], math.prod(shape[1:])


@dataclass(frozen=True)
class MatrixDirection(Direction):
    """The dimensions of an operand in a product of matrices or batches of them; every matrix has its own channels."""

    def spread(self, scales: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: D102 (documented above)
        if scales.numel() <= 1:
            return scales.view(()) if scales.numel() else scales.sum()  # an empty tensor has no scales
        return scales.view(*shape[:-2], shape[self.kept]).unsqueeze(-1 if self.result == -2 else -2)

    def step(self, scaling: Scaling) -> int:  # noqa: D102 (documented above)
        if isinstance(scaling, PerBlock):
            return scaling.size
        return (scaling.width if self.summed == -1 else scaling.height) if isinstance(scaling, PerTile) else 0

    def chains(self, scales: Tensor, tiles: numbers.TileSizes, shape: Sequence[int], chain: int) -> ChainScales:  # noqa: D102 (documented above)
        if self.summed == -1:
            # Blocks along the last dimension are tiles of matrices of one row each.
            held = scales.view(*shape[:-1], scales.shape[2]) if tiles.rows == 1 else scales.view(*shape[:-2], *scales.shape[1:])
            return ChainScales(held, tiles.height, tiles.width // chain)
        return ChainScales(scales.view(*shape[:-2], *scales.shape[1:]).mT, tiles.width, tiles.height // chain)

    def summed_dims(self, dims: int, merges: bool) -> Sequence[int]:  # noqa: D102 (documented above)
        rows, columns = self.matrix_dims(dims, merges)
        return columns if self.summed == -1 else rows

    def channel_dims(self, dims: int, merges: bool) -> Sequence[int]:  # noqa: D102 (documented above)
        return self.summed_dims(dims, merges)

    def matrix_dims(self, dims: int, merges: bool) -> tuple[Sequence[int], Sequence[int]]:  # noqa: D102 (documented above)
        return range(dims - 1) if merges else [dims - 2], [dims - 1]

    def _channels(self, shape: Sequence[int]) -> numbers.TileSizes:
        if len(shape) == 2:
            return tiles_of_channels(self.kept, shape)
        rows, columns = shape[-2:]
        return (
            numbers.TileSizes(1, columns, 1, max(columns, 1), False)
            if self.summed == -1
            else numbers.TileSizes(rows, columns, max(rows, 1), 1, False)
        )

    def _matrix(self, shape: Sequence[int]) -> Sequence[int]:
        return shape


@dataclass(frozen=True)
class OwnDirection(Direction):
    """The dimensions of a tensor outside of products: those of its scaling."""

    def tiles(self, scaling: Scaling, shape: Sequence[int]) -> numbers.TileSizes:  # noqa: D102 (documented above)
        return scaling.tiles(shape)


#: No dimension of such a tensor is summed over.
OWN = OwnDirection(-1, -1, -1)


@dataclass(frozen=True)
class Directions:
    """The directions of the operands of three products, by the points at which they are rounded.

    Attributes:
        act: The first operand, forward.
        weight: The second.
        grad: The gradient, in the product that gives the first operand's.
        weight_bwd: The second operand there.
        grad_w: The gradient, in the product that gives the second operand's.
        act_bwd: The first operand there.
    """

    act: Direction
    weight: Direction
    grad: Direction
    weight_bwd: Direction
    grad_w: Direction
    act_bwd: Direction


#: `a @ w.T`, for weights in the layout of layers.
LINEAR = Directions(
    act=MatrixDirection(-1, -2, -2),
    weight=MatrixDirection(-1, -2, -1),
    grad=MatrixDirection(-1, -2, -2),
    weight_bwd=MatrixDirection(-2, -1, -1),
    grad_w=MatrixDirection(-2, -1, -2),
    act_bwd=MatrixDirection(-2, -1, -1),
)
#: `a @ b`.
MATMUL = Directions(
    act=MatrixDirection(-1, -2, -2),
    weight=MatrixDirection(-2, -1, -1),
    grad=MatrixDirection(-1, -2, -2),
    weight_bwd=MatrixDirection(-1, -2, -1),
    grad_w=MatrixDirection(-2, -1, -1),
    act_bwd=MatrixDirection(-2, -1, -2),
)
CONVOLUTION = Directions(
    act=Direction(1, 0, 0),
    weight=Direction(1, 0, 1),
    grad=Direction(1, 0, 0),
    weight_bwd=Direction(0, 1, 1),
    grad_w=Direction(0, 1, 0),
    act_bwd=Direction(0, 1, 1),
)
TRANSPOSED = Directions(
    act=Direction(1, 0, 0),
    weight=Direction(0, 1, 1),
    grad=Direction(1, 0, 0),
    weight_bwd=Direction(1, 0, 1),
    grad_w=Direction(0, 1, 1),
    act_bwd=Direction(0, 1, 0),
)
