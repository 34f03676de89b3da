"""Along which dimensions the operands of a layer's three products are scaled, and where in the result the scales of channels belong.

Forward `Y = A W`, backward `∇A = ∇Y W` and `∇W = ∇Y A`: each of the six operands has a dimension over which its product sums, along which
blocks and transforms lie, and one that stays a dimension of the result, along which channels lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qsim.scaling import Blocks, Channel, Scaling, Tiles
from qsim.scaling.geometry import tiles_of_blocks, tiles_of_channels
from qsim_kernels import scales as numbers


@dataclass(frozen=True)
class Direction:
    """How an operand lies in a product of tensors whose first two dimensions are samples and channels, as convolutions have them.

    Attributes:
        summed: The dimension that the product sums over.
        kept: The one that it does not.
        result: Which dimension of the result that becomes.
    """

    summed: int
    kept: int
    result: int

    def tiles(self, scaling: Scaling, shape: Sequence[int]) -> numbers.Tiles:
        """Which elements of an operand share a scale."""
        if isinstance(scaling, Blocks):
            return tiles_of_blocks(scaling.size, self.summed, shape)
        if isinstance(scaling, Channel):
            return self._channels(shape)
        return scaling.tiles(self._matrix(shape) if isinstance(scaling, Tiles) else shape)

    def spread(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """The scales of an operand's channels, or the one of all, as they are multiplied with the result."""
        if scales.numel() <= 1:
            return scales.sum()  # of nothing there are none
        return scales.view([-1 if dim == self.result else 1 for dim in range(len(shape))])

    def summed_dims(self, dims: int, merges: bool) -> Sequence[int]:
        """Of an operand of so many dimensions, those that are summed over as one."""
        return (self.summed,)

    def channel_dims(self, dims: int, merges: bool) -> Sequence[int]:
        """Those along which the elements of a channel lie."""
        return [dim for dim in range(dims) if dim != self.kept]

    def matrix_dims(self, dims: int, merges: bool) -> tuple[Sequence[int], Sequence[int]]:
        """Those that are the rows of the matrix that it lies as, and those that are its columns."""
        return [0], range(1, dims)

    def _channels(self, shape: Sequence[int]) -> numbers.Tiles:
        return tiles_of_channels(self.kept, shape)

    def _matrix(self, shape: Sequence[int]) -> Sequence[int]:
        """An operand as the matrix that it lies in memory as."""
        return shape[0], math.prod(shape[1:])


@dataclass(frozen=True)
class MatrixDirection(Direction):
    """How an operand lies in a product of matrices or batches of them; every matrix has channels of its own."""

    def spread(self, scales: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: D102 (documented above)
        if scales.numel() <= 1:
            return scales.sum()  # of nothing there are none
        return scales.view(*shape[:-2], shape[self.kept]).unsqueeze(-1 if self.result == -2 else -2)

    def summed_dims(self, dims: int, merges: bool) -> Sequence[int]:  # noqa: D102 (documented above)
        rows, columns = self.matrix_dims(dims, merges)
        return columns if self.summed == -1 else rows

    def channel_dims(self, dims: int, merges: bool) -> Sequence[int]:  # noqa: D102 (documented above)
        return self.summed_dims(dims, merges)

    def matrix_dims(self, dims: int, merges: bool) -> tuple[Sequence[int], Sequence[int]]:  # noqa: D102 (documented above)
        return range(dims - 1) if merges else [dims - 2], [dims - 1]

    def _channels(self, shape: Sequence[int]) -> numbers.Tiles:
        if len(shape) == 2:
            return tiles_of_channels(self.kept, shape)
        rows, columns = shape[-2:]
        return (
            numbers.Tiles(1, columns, 1, max(columns, 1), False)
            if self.summed == -1
            else numbers.Tiles(rows, columns, max(rows, 1), 1, False)
        )

    def _matrix(self, shape: Sequence[int]) -> Sequence[int]:
        return shape


@dataclass(frozen=True)
class OwnDirection(Direction):
    """How a tensor lies that stands in no product: as its scaling says."""

    def tiles(self, scaling: Scaling, shape: Sequence[int]) -> numbers.Tiles:  # noqa: D102 (documented above)
        return scaling.tiles(shape)


#: Of such a tensor no dimension is summed over.
OWN = OwnDirection(-1, -1, -1)


@dataclass(frozen=True)
class Directions:
    """How the operands of three products lie, by the points at which they are rounded.

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


#: `a @ w.T`, of weights as layers have them.
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
