"""The plain numbers that describe scales to the kernels: which elements share one, and how it is computed from the largest of them.

Both are passed to the operators as numbers or as text, like those of `numbers.grid`. Elementwise, a value is `Q(x / s) * s`, where `Q`
rounds onto a grid and `s` is a value of a grid of its own.

A tensor is viewed as consecutive matrices, `rows` by `columns`, in logical order. Each is cut into tiles of `height` by `width`, the
last of which may be smaller, and the elements of a tile share a scale. Where scales go `across`, the tiles at the same position in all
matrices share it. So blocks along the last dimension are tiles of one row, blocks along another are tiles of one column, and a whole
tensor is one tile.

A tensor may first be Hadamard-transformed: see `Turn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from qsim_kernels.numbers.carrier import DOUBLE, Carrier, GridNumbers, Variant, grid_in
from qsim_kernels.numbers.grid import BAR, Grid, Mode, Noise, Overflow, Rule, draws, read, spell


class ScaleRule(IntEnum):
    """How to compute a scale from the largest magnitude `a` of its elements, where `M` is the largest value of their grid.

    FIT is the value of the scales' grid that is nearest to `a / M`, so that `a` lands on or next to `M`; CEIL is the smallest value that is
    not below `a / M`, so that nothing saturates. The others are powers of two: FLOOR is `2**(floor(log2 a) - floor(log2 M))`, the rule of
    OCP's MX formats, under which values between `M` and the next power of two saturate; EVEN is the same after `a` has been rounded to
    the elements' precision, ties to even, and CEIL_LOG2 after it has been rounded up to a power of two. STOCHASTIC is one of the two values
    next to `a / M`, drawn so that it is the mean.
    """

    FIT = 0
    CEIL = 1
    FLOOR = 2
    EVEN = 3
    CEIL_LOG2 = 4
    STOCHASTIC = 5


class Scales(NamedTuple):
    """How scales are made.

    Attributes:
        rule: A `ScaleRule`.
        margin: Scales are larger by this power of two.
        largest: `M`.
        mantissa: The elements' significant bits after the first.
        least: The smallest scale, also used where all elements are zero. At least `SMALLEST`, so that inverses are float32 numbers.
        grid: The scales' values.
    """

    rule: int
    margin: int
    largest: float
    mantissa: int
    least: float
    grid: Grid

    @property
    def draws(self) -> bool:
        """Whether random bits are drawn."""
        return rounding_of_scales(self.rule).draws


class ScaleChoice(NamedTuple):
    """A choice between scales that let a tile's largest magnitude become one of several candidates; the one of least error is kept.

    Scales are those of `a / candidate` under one of the tensor: its largest magnitude divided by `reach` and `M`. They are computed in
    float64, and their products are rounded to float32 at the end. Of equal errors, the first candidate's counts.

    Attributes:
        candidates: The candidates, in the order of preference.
        squares: Whether errors are measured by the sum of their squares; otherwise, of their magnitudes.
        reach: What the largest scale becomes under the scale of the tensor.
    """

    candidates: tuple[float, ...]
    squares: bool
    reach: float


class ScaleGroups(NamedTuple):
    """Scales above those of tiles: the largest magnitude of each group of elements, divided by a number.

    Attributes:
        tiles: The groups.
        reach: The largest number that tiles under their scales reach.
    """

    tiles: TileSizes
    reach: float


class ScaleCorrection(NamedTuple):
    """A correction of scales that makes up for the rounding of elements: MS-EDEN.

    Tiles have nearest scales under one of the tensor, as in `ScaleChoice`, but in the precision of the values. Where `x` are a group's
    values divided by those and `Q(x)` its elements, scales times `<x, x> / <x, Q(x)>` are rounded again.

    Attributes:
        size: Elements of a group, along a row.
        reach: What the largest scale becomes under the scale of the tensor.
        rule: How corrected scales are rounded.
    """

    size: int
    reach: float
    rule: Rule


def spell_scales(scales: Scales) -> tuple[str, str]:
    """Format scales as two texts: how they are made, and their grid."""
    making, grid = spell(scales).split(BAR)
    return making, grid


@lru_cache(maxsize=4096)
def read_scales(making: str, grid: str) -> Scales:
    """Parse the output of `spell_scales`."""
    scales: Scales = read(Scales, BAR.join((making, grid)))
    return scales


class ScaleNumbers(NamedTuple):
    """The numbers from which a scale is computed, in a carrier's bits; see `Scales`.

    Attributes:
        largest: The largest value of the elements' grid.
        factor: Two to the margin.
        power: The margin minus the exponent of `largest`.
        spare: Mantissa bits of the carrier beyond the elements'.
        least: The smallest scale.
        grid: The scales' values.
    """

    largest: Any
    factor: Any
    power: Any
    spare: Any
    least: Any
    grid: GridNumbers


@lru_cache(maxsize=1024)
def scale_numbers(scales: Scales, carrier: Carrier = DOUBLE) -> ScaleNumbers:
    """The numbers from which scales are computed, under the rounding `rounding_of_scales`."""
    largest, grid = carrier.pattern(scales.largest), grid_in(carrier, scales.grid)
    # Without zero, every number is above half of the smallest.
    values = grid.numbers() if grid.zero else grid.numbers()._replace(half=-1)
    power = scales.margin + carrier.bias - (largest >> carrier.mantissa)
    spare = carrier.mantissa - scales.mantissa
    return ScaleNumbers(largest, carrier.pattern(2.0**scales.margin), power, spare, carrier.pattern(scales.least), values)


def rounding_of_scales(rule: int) -> Rule:
    """The rounding onto the scales' grid."""
    mode = {ScaleRule.CEIL: Mode.UP, ScaleRule.STOCHASTIC: Mode.STOCHASTIC}.get(ScaleRule(rule), Mode.NEAREST)
    return Rule(int(mode), 32 if draws(mode) else 0, False, int(Overflow.SATURATE))


def variant_of_scales(rule: int) -> Variant:
    """The facts of that rounding, the same for all grids."""
    facts = {"flat": False, "zero": True, "signed": False, "keep_sign": False, "symmetric": True, "open": False}
    return Variant(rounding_of_scales(rule).mode, int(Overflow.SATURATE), **facts)


#: Where the indices of scales begin, whose random bits are those of the first elements of their tiles behind it: no element is there.
SCALE_INDICES = 1 << 62
#: The columns of tiles of a transform whose largest magnitudes kernels can find while they round the tensor.
AHEAD = 256
#: The smallest scale allowed, so that its inverse is a float32.
SMALLEST = 2.0**-127


class TileSizes(NamedTuple):
    """Which elements share a scale; see the module docstring.

    Attributes:
        rows: Rows of a matrix.
        columns: Columns of a matrix.
        height: Rows of a tile.
        width: Columns of a tile.
        across: Whether the tiles at the same position in all matrices are one tile.
    """

    rows: int
    columns: int
    height: int
    width: int
    across: bool

    def counts(self, elements: int) -> tuple[int, int, int]:
        """The number of scales: matrices, tiles down a matrix, and tiles along it."""
        matrices = elements // (self.rows * self.columns) if self.rows * self.columns else 0
        return (min(matrices, 1) if self.across else matrices), -(-self.rows // self.height), -(-self.columns // self.width)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> TileSizes:
        """Tiles from an operator's arguments."""
        rows, columns, height, width, across = numbers
        return cls(rows, columns, height, width, bool(across))


class Turn(NamedTuple):
    """A Hadamard transform before rounding, of blocks along one dimension; a last shorter block is cut into powers of two.

    The signs of some elements of a block `x` are flipped, and `H x / sqrt(size)` replaces it, where `H` is Sylvester's matrix.

    Attributes:
        size: Elements of a block, a power of two.
        length: Elements along the dimension.
        inner: Elements of all later dimensions.
        signs: The seed of the random signs, or -1 for none. All blocks use the same `size` signs.
    """

    size: int
    length: int
    inner: int
    signs: int


class Restore(IntEnum):
    """Which scales elements are multiplied by again after rounding."""

    NOTHING = 0
    SCALE = 1  # but not the scale of the whole tensor, under which it is
    ALL = 2


class ElementRounding(NamedTuple):
    """How elements divided by their scales are rounded.

    Attributes:
        grid: The values to choose from.
        rule: How to choose.
        restore: What the result is multiplied by.
    """

    grid: Grid
    rule: Rule
    restore: Restore


class ScaledRounding(NamedTuple):
    """How a tensor is rounded under scales.

    Attributes:
        tiles: Which elements share a scale.
        turn: The transform of the values beforehand.
        elements: How elements are rounded.
        noise: The random bits.
    """

    tiles: TileSizes
    turn: Turn | None
    elements: ElementRounding
    noise: Noise
