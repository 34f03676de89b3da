"""The dimensions along which the operands of a layer's three products are scaled, and the place of channel scales in the result.

Forward `Y = A W`, backward `∇A = ∇Y W` and `∇W = ∇Y A`: each of the six operands has a dimension over which its product sums, used for
blocks and transforms, and one that stays a dimension of the result, used for channels. All of them follow from the product's equation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qsim.scaling import PerBlock, PerTile, Scaling
from qsim.scaling.geometry import tiles_of_blocks, tiles_of_channels
from qsim.scaling.tiling import PerSlice
from qsim_kernels.numbers.scales import TileSizes
from qsim_kernels.torch.sums import ChainScales

#: The operands of the three products, by the names of their points.
PRODUCTS = (("act", "weight"), ("grad", "weight_bwd"), ("grad_w", "act_bwd"))


@dataclass(frozen=True)
class Along:
    """The dimensions of an operand in its product.

    Negative ones are the last two, those of matrices or batches of them, where every matrix has its own channels. Others are the first two,
    samples and channels, as in convolutions.

    Attributes:
        summed: The dimension that the product sums over.
        kept: The dimension that it keeps.
        result: The dimension of the result that this becomes.
    """

    summed: int
    kept: int
    result: int

    @property
    def is_matrix(self) -> bool:
        """Whether the operand is a matrix, or a batch of them."""
        return self.summed < 0

    def tiles(self, scaling: Scaling, shape: Sequence[int]) -> TileSizes:
        """Which elements of an operand share a scale."""
        if isinstance(scaling, PerBlock):
            return tiles_of_blocks(scaling.size, self.summed, shape)
        if isinstance(scaling, PerSlice):
            return self._channels(shape)
        in_memory = (shape[0], math.prod(shape[1:])) if isinstance(scaling, PerTile) and not self.is_matrix else shape
        return scaling.tiles(in_memory)

    def _channels(self, shape: Sequence[int]) -> TileSizes:
        if not self.is_matrix or len(shape) == 2:
            return tiles_of_channels(self.kept, shape)
        rows, columns = shape[-2:]
        height, width = (1, max(columns, 1)) if self.summed == -1 else (max(rows, 1), 1)
        return TileSizes(1 if self.summed == -1 else rows, columns, height, width, False)

    def spread(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        """The scales of an operand's channels, or its single scale, shaped for multiplication with the result."""
        if scales.numel() <= 1:
            return scales.view(()) if scales.numel() else scales.sum()  # an empty tensor has no scales
        if self.is_matrix:
            return scales.view(*shape[:-2], shape[self.kept]).unsqueeze(-1 if self.result == -2 else -2)
        return scales.view([-1 if dim == self.result else 1 for dim in range(len(shape))])

    def step(self, scaling: Scaling) -> int:
        """The number of neighbours along the sum that share a scale of blocks or tiles; 0 where short sums cannot have scales."""
        if not self.is_matrix:
            return 0
        if isinstance(scaling, PerBlock):
            return scaling.size
        return (scaling.width if self.summed == -1 else scaling.height) if isinstance(scaling, PerTile) else 0

    def chains(self, scales: Tensor, tiles: TileSizes, shape: Sequence[int], chain: int) -> ChainScales:
        """The scales of blocks or tiles of a tensor of a shape for short sums of `chain` products."""
        if self.summed == -1:
            # Blocks along the last dimension are tiles of matrices of one row each.
            held = scales.view(*shape[:-1], scales.shape[2]) if tiles.rows == 1 else scales.view(*shape[:-2], *scales.shape[1:])
            return ChainScales(held, tiles.height, tiles.width // chain)
        return ChainScales(scales.view(*shape[:-2], *scales.shape[1:]).mT, tiles.width, tiles.height // chain)

    def summed_dims(self, dims: int, merges: bool) -> Sequence[int]:
        """The dimensions summed over as one, for an operand with `dims` dimensions."""
        rows, columns = self.matrix_dims(dims, merges)
        return (self.summed,) if not self.is_matrix else columns if self.summed == -1 else rows

    def channel_dims(self, dims: int, merges: bool) -> Sequence[int]:
        """The dimensions along which the elements of a channel extend."""
        return self.summed_dims(dims, merges) if self.is_matrix else [dim for dim in range(dims) if dim != self.kept]

    def matrix_dims(self, dims: int, merges: bool) -> tuple[Sequence[int], Sequence[int]]:
        """The dimensions that form the rows, and those that form the columns, of the operand as a matrix."""
        if not self.is_matrix:
            return [0], range(1, dims)
        return range(dims - 1) if merges else [dims - 2], [dims - 1]


def along(equation: str) -> dict[str, Along]:
    """By the names of the points, the dimensions of the six operands of an operation.

    Args:
        equation: Two dimensions of both operands and of the result, as `torch.einsum` writes them; `...` stands for the others.
    """
    first = -2 if equation.startswith("...") else 0
    a, b, y = equation.replace("...", "").replace("->", ",").split(",")
    found = {}
    for names, (*operands, result) in zip(PRODUCTS, ((a, b, y), (y, b, a), (y, a, b)), strict=True):
        for name, operand in zip(names, operands, strict=True):
            kept = int(operand[1] in result)
            found[name] = Along(1 - kept + first, kept + first, result.index(operand[kept]) + first)
    return found
