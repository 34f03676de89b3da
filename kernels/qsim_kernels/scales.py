"""The plain numbers that describe scales to the kernels: which elements share one, and how it follows from the largest of them.

Both reach the operators as numbers or as text, like those of `qsim_kernels.grid`. A value is `Q(x / s) * s`, element by element; `Q` rounds
onto a grid, and `s` is one of a grid of its own.

A tensor is seen as matrices, `rows` by `columns`, one behind the other in logical order. Each is cut into tiles of `height` by `width`, the
last of which may be smaller, and the elements of a tile share a scale. Where scales go `across`, the tiles at one place in all matrices
share it. So blocks along the last dimension are tiles of one row, blocks along another are tiles of one column, and a whole tensor is one.

Before all that a tensor may be turned: see `Turn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from qsim_kernels.grid import Grid, Rule, read, spell


class ScaleRule(IntEnum):
    """How a scale follows from the largest magnitude `a` of its elements, where `M` is the largest value of theirs.

    FIT is the value of the scales' grid that is nearest to `a / M`, so that `a` lands on `M` or beside it; CEIL is the smallest one that is
    not below, so that nothing saturates. The others are powers of two: FLOOR is `2**(floor(log2 a) - floor(log2 M))`, the rule of OCP's MX
    formats, under which what lies between `M` and the next power of two saturates; EVEN does the same after `a` has been rounded to the
    elements' precision, to nearest even.
    """

    FIT = 0
    CEIL = 1
    FLOOR = 2
    EVEN = 3


class Scales(NamedTuple):
    """How scales are made.

    Attributes:
        rule: A `ScaleRule`.
        margin: Scales are larger by so many powers of two.
        largest: `M`.
        mantissa: log2 of the number of elements' values in a binade.
        least: No scale is below; where all elements are zero it is this. At least `SMALLEST`, so that inverses are float32 numbers.
        grid: The scales' values.
    """

    rule: int
    margin: int
    largest: float
    mantissa: int
    least: float
    grid: Grid


class Making(NamedTuple):
    """`Scales` less their grid, which is spelt by itself."""

    rule: int
    margin: int
    largest: float
    mantissa: int
    least: float


def spell_scales(scales: Scales) -> tuple[str, str]:
    """Two texts: how scales are made, and their grid."""
    return spell(Making(*scales[:-1])), spell(scales.grid)


def read_scales(making: str, grid: str) -> Scales:
    """What `spell_scales` has spelt."""
    made: Making = read(Making, making)
    return Scales(*made, read(Grid, grid))


#: No scale is below, so that its inverse is a float32.
SMALLEST = 2.0**-127


class Tiles(NamedTuple):
    """Which elements share a scale; see the module.

    Attributes:
        rows: Of a matrix.
        columns: Of a matrix.
        height: Rows of a tile.
        width: Columns of a tile.
        across: Whether the tiles at one place in all matrices are one.
    """

    rows: int
    columns: int
    height: int
    width: int
    across: bool

    def counts(self, elements: int) -> tuple[int, int, int]:
        """How many scales there are: of matrices, and of tiles down and along one."""
        matrices = elements // (self.rows * self.columns) if self.rows * self.columns else 0
        return (min(matrices, 1) if self.across else matrices), -(-self.rows // self.height), -(-self.columns // self.width)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Tiles:
        """What an operator was given."""
        rows, columns, height, width, across = numbers
        return cls(rows, columns, height, width, bool(across))


class Turn(NamedTuple):
    """A Hadamard transform before the rounding: of blocks along one dimension, of which a last shorter one is cut into powers of two.

    A block is `x`, the signs of some of its elements are changed, and `H x / sqrt(size)` takes its place, where `H` is Sylvester's matrix.

    Attributes:
        size: Elements of a block, a power of two.
        length: Elements along the dimension.
        inner: Elements of all later dimensions.
        signs: The seed of the random signs, or -1 for none. The same `size` signs serve all blocks.
    """

    size: int
    length: int
    inner: int
    signs: int


class Restore(IntEnum):
    """What elements are multiplied with again after they have been rounded."""

    NOTHING = 0
    SCALE = 1  # but not with the scale of the whole, under which it is
    ALL = 2


class Elements(NamedTuple):
    """How what is divided by its scale is rounded.

    Attributes:
        seed: A 0-d int64 tensor, needed for stochastic rounding alone.
        grid: The values to choose from.
        rule: How to choose.
        stream: Which of the seed's streams of random bits.
        offset: Logical index of the first element.
        restore: What the result is multiplied with.
    """

    seed: Tensor | None
    grid: Grid
    rule: Rule
    stream: int
    offset: int
    restore: Restore
