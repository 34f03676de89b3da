"""Regions of matrices, one per program: where their elements are, how they are read, Hadamard-transformed if asked, and written.

The additions of a transform and their order are those of `arithmetic.hadamard`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import INTERPRETED
from qsim_kernels.triton.device.blocks import as_single, narrowed
from qsim_kernels.triton.device.parts import Part, load_part, store_part


class Matrices(NamedTuple):
    """A tensor viewed as consecutive matrices, and the tiles in them that share a scale.

    Attributes:
        rows: Rows of a matrix.
        columns: Columns of a matrix.
        down: Tiles down a matrix.
        along: Tiles along a matrix.
        regions_down: Regions down a matrix.
        regions_along: Regions along a matrix.
    """

    rows: Any
    columns: Any
    down: Any
    along: Any
    regions_down: Any
    regions_along: Any


class RegionShape(NamedTuple):
    """The form of a region that a kernel is compiled for.

    Attributes:
        height: Rows of a region.
        width: Columns of a region.
        tile_height: Rows of a tile, 0 for all of the matrix.
        tile_width: Columns of a tile, 0 for all of the matrix.
        flat: Whether there is only one row.
        even: Whether rows begin at multiples of 16 elements.
        aligned: Whether rows begin where random bits begin.
        run: Number of neighbours a thread holds; 16 or 32 only of rows of 16-bit values whose number is a multiple of that.
        transposed: Whether matrices are stored transposed. Threads then hold `run` neighbours of a row, which are in as many rows in
            memory, and regions have whole runs.
    """

    height: int
    width: int
    tile_height: int
    tile_width: int
    flat: bool
    even: bool
    aligned: bool
    run: int
    transposed: bool = False


class RegionPlace(NamedTuple):
    """The position of a region.

    Attributes:
        matrix: Number of its matrix.
        row: Its first row.
        column: Its first column.
        first: The index of each row's first element in the tensor.
    """

    matrix: Any
    row: Any
    column: Any
    first: Any


class TurnVariant(NamedTuple):
    """A transform that a kernel is compiled for.

    Attributes:
        levels: log2 of the elements of a block; 0 for no transform.
        down: Whether blocks run down the rows of a region; otherwise along its columns.
        factor: The final factor of all elements.
        bounded: Whether finite values are so small that no sum of a block overflows; otherwise large ones saturate first.
    """

    levels: int
    down: bool
    factor: float
    bounded: bool


NO_TURN = TurnVariant(0, False, 1.0, True)


@triton.jit
def row_starts(row, columns, column, HEIGHT: tl.constexpr, EVEN: tl.constexpr):
    """The indices of rows' elements in a column; the compiler must see multiples of 16, or threads would read single elements."""
    starts = (row + tl.arange(0, HEIGHT)) * columns + column
    if EVEN:
        starts = tl.multiple_of(starts, [16])
    return starts


@triton.jit
def region_place(region, matrices, REGION: tl.constexpr):
    """The position of the region with a given number."""
    if REGION.flat:
        matrix, row, column = region * 0, region * 0, region.to(tl.int64) * REGION.width
        first = column + tl.arange(0, 1)
    else:
        # 64-bit divisions take as long as everything else, and signed ones longer than others.
        along, down = matrices.regions_along.to(tl.uint32), matrices.regions_down.to(tl.uint32)
        region = region.to(tl.uint32)
        if REGION.transposed:
            rest = region // down
            row, column, matrix = region % down, rest % along, rest // along
        else:
            rest = region // along
            row, column, matrix = rest % down, region % along, rest // down
        row, column, matrix = row.to(tl.int64) * REGION.height, column.to(tl.int64) * REGION.width, matrix.to(tl.int64)
        first = row_starts(matrix * matrices.rows + row, matrices.columns, column, REGION.height, REGION.even)
    return RegionPlace(matrix, row, column, first)


@triton.jit
def in_memory(at, matrices, held, REGION: tl.constexpr):
    """The position of a region in memory and the numbers that bound it there, if the rows of matrices are runs of a tensor's rows.

    Args:
        at: The region's position in logical order, in which elements have their random bits.
        matrices: The matrices.
        held: For each matrix, its first row in the tensor, and how many rows it has; `None` if matrices follow each other.
        REGION: The form of the region.
    """
    if held is None:
        return at, matrices
    else:
        first = tl.load(held + 2 * at.matrix).to(tl.int64)
        row, end = first + at.row, first + tl.load(held + 2 * at.matrix + 1)
        starts = row_starts(row, matrices.columns, at.column, REGION.height, REGION.even)
        bounds = Matrices(end, matrices.columns, matrices.down, matrices.along, matrices.regions_down, matrices.regions_along)
        return RegionPlace(at.matrix * 0, row, at.column, starts), bounds


@triton.jit
def inside(row, rows, column, columns, REGION: tl.constexpr):
    """Return a mask of the elements before a given row and column; if rows are even, in a form that lets threads read many at once."""
    left = columns - column
    if REGION.even:
        left = tl.multiple_of(left, 16)
    return (tl.arange(0, REGION.height) < rows - row)[:, None] & (tl.arange(0, REGION.width) < left)[None, :]


@triton.jit
def region_part(at, matrices, REGION: tl.constexpr):
    """The elements of a region as a `Part`."""
    places = at.first[:, None] + tl.arange(0, REGION.width)[None, :]
    return Part(0, places, inside(at.row, matrices.rows, at.column, matrices.columns, REGION), at.first)


@triton.jit
def with_signs(x, signs, TURN: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Flip the signs that a transform flips; for the arguments see `hadamard`."""
    if TURN.levels > 0:
        place = tl.arange(0, HEIGHT if TURN.down else WIDTH) % (1 << TURN.levels)
        flips = (signs.to(tl.int32) >> place) << 31
        flips = flips[:, None] if TURN.down else flips[None, :]
        x = (x.to(tl.int32, bitcast=True) ^ flips).to(tl.float32, bitcast=True)
    return x


@triton.jit
def hadamard(x, signs, TURN: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, filled=None, CAREFUL: tl.constexpr = True):
    """Transform a region of float32 values; see `transformed`. Large finite values saturate first, if `CAREFUL`."""
    if CAREFUL and not TURN.bounded:
        x = limited(x, TURN)
    return transformed(x, signs, TURN, HEIGHT, WIDTH, filled)


@triton.jit
def limited(x, TURN: tl.constexpr):
    """Clamp finite values so that no sum of a block overflows."""
    LARGEST: tl.constexpr = 3.4028234663852886e38 / (1 << TURN.levels)
    return tl.where(tl.abs(x) < float("inf"), tl.maximum(tl.minimum(x, LARGEST), -LARGEST), x)


@triton.jit
def transformed(x, signs, TURN: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, filled=None):
    """Transform a region of float32 values whose sums do not overflow.

    Args:
        x: The values, `HEIGHT` by `WIDTH`.
        signs: One bit per element of a block: whether its sign is flipped.
        TURN: The `TurnVariant`.
        HEIGHT: Rows.
        WIDTH: Columns.
        filled: How many rows exist, if blocks run down: a block of which not all do is cut into powers of two, the largest first.
    """
    if TURN.levels > 0:
        CUT: tl.constexpr = TURN.down and filled is not None
        LEVELS: tl.constexpr = TURN.levels
        FACTOR: tl.constexpr = TURN.factor
        INNER: tl.constexpr = WIDTH if TURN.down else 1
        x = with_signs(x, signs, TURN, HEIGHT, WIDTH)
        for level in tl.static_range(LEVELS):
            pairs = tl.reshape(x, (HEIGHT * WIDTH // (INNER << (level + 1)), 2, INNER << level))
            first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
            total, difference = first + second, first - second
            if CUT:
                # A power of two of rows that exist is part of such a piece.
                whole = (((tl.arange(0, HEIGHT >> (level + 1)) + 1) << (level + 1)) <= filled)[:, None]
                total, difference = tl.where(whole, total, first), tl.where(whole, difference, second)
            pairs = tl.permute(tl.join(total, difference), (0, 2, 1))
            x = tl.reshape(pairs, (HEIGHT, WIDTH))
        if CUT:
            x *= piece_factors(tl.arange(0, HEIGHT), filled, LEVELS)[:, None]
        else:
            x *= FACTOR
    return x


@triton.jit
def piece_factors(row, filled, LEVELS: tl.constexpr):
    """The factor of the transform of the piece that a row is in."""
    factors = row * 0 + 1.0
    for level in tl.static_range(1, LEVELS + 1):
        factors = tl.where((((row >> level) + 1) << level) <= filled, 0.7071067811865476**level, factors)
    return factors


@triton.jit
def load_transformed(
    x, at, matrices, signs, TURN: tl.constexpr, REGION: tl.constexpr, CUT: tl.constexpr = False, CAREFUL: tl.constexpr = True
):  # fmt: skip
    """Load the elements of a region as float32 and transform them; see `hadamard`. `CUT` if a matrix may end within a block."""
    values = load_region(x, at, matrices, REGION)
    return hadamard(values, signs, TURN, REGION.height, REGION.width, matrices.rows - at.row if CUT else None, CAREFUL)


@triton.jit
def load_region(x, at, matrices, REGION: tl.constexpr):
    """Load the elements of a region as float32."""
    if REGION.transposed:
        places, inside = places_of_runs(at, matrices, REGION)
        return load_columns(x, places, matrices.rows, inside, REGION.run)
    elif REGION.flat and REGION.run >= 16:
        return as_single(load_runs(x, at, matrices, REGION))
    else:
        return as_single(load_part(x, region_part(at, matrices, REGION)))


@triton.jit
def store_region(out, values, at, matrices, REGION: tl.constexpr):
    """Write float32 values of a region."""
    if REGION.transposed:
        places, inside = places_of_runs(at, matrices, REGION)
        store_columns(out, values, places, matrices.rows, inside, REGION.run)
    else:
        store_part(out, narrowed(values, out.dtype.element_ty), region_part(at, matrices, REGION))


@triton.jit
def places_of_runs(at, matrices, REGION: tl.constexpr):
    """The memory offsets of the first elements of runs in matrices that are stored transposed, and which of them exist."""
    row, run = at.row + tl.arange(0, REGION.height), at.column + REGION.run * tl.arange(0, REGION.width // REGION.run)
    starts = (at.matrix * matrices.columns + run) * matrices.rows
    if REGION.even:
        starts = tl.multiple_of(starts, [16])
    return starts[None, :] + row[:, None], (row < matrices.rows)[:, None] & (run < matrices.columns)[None, :]


@triton.jit
def load_columns(x, places, step, inside, COUNT: tl.constexpr):
    """Load `COUNT` elements, `step` apart in memory, as neighbours of a row: one load each, so that a thread holds them all."""
    if COUNT == 1:
        return as_single(tl.load(x + places, mask=inside, other=0))
    else:
        HALF: tl.constexpr = COUNT // 2
        even = load_columns(x, places, 2 * step, inside, HALF)
        return tl.interleave(even, load_columns(x + step, places, 2 * step, inside, HALF))


@triton.jit
def store_columns(out, values, places, step, inside, COUNT: tl.constexpr):
    """Write what `load_columns` loads."""
    if COUNT == 1:
        tl.store(out + places, narrowed(values, out.dtype.element_ty), mask=inside)
    else:
        HALF: tl.constexpr = COUNT // 2
        even, odd = tl.split(tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2)))
        store_columns(out, even, places, 2 * step, inside, HALF)
        store_columns(out + step, odd, places, 2 * step, inside, HALF)


@triton.jit
def limited_if_large(values, TURN: tl.constexpr, REGION: tl.constexpr):
    """Saturate the finite values of a region whose sums could overflow, if there are any."""
    if not TURN.bounded:
        # One warp decides faster than several, which would wait for each other.
        largest = tl.max(tl.max(tl.abs(values), axis=1), axis=0) if REGION.height * REGION.width <= 32 * REGION.run else float("inf")
        if largest > 3.4028234663852886e38 / (1 << TURN.levels):
            values = limited(values, TURN)
    return values


@triton.jit
def load_in_basis(x, flips, at, matrices, signs, TURN: tl.constexpr, REGION: tl.constexpr):
    """Load a region in the basis of a transform along rows; for the arguments see `torch.hadamard.in_basis`."""
    values = limited_if_large(load_region(x, at, matrices, REGION), TURN, REGION)
    return transformed(flipped(values, flips, TURN, REGION), signs, TURN, REGION.height, REGION.width)


@triton.jit
def store_from_basis(out, values, factors, flips, at, matrices, signs, TURN: tl.constexpr, REGION: tl.constexpr):
    """Multiply values by factors, undo a transform and write the result."""
    values = limited_if_large(product_apart(values, factors), TURN, REGION)
    values = transformed(values, signs * 0, TURN, REGION.height, REGION.width)
    values = with_signs(values, signs, TURN, REGION.height, REGION.width)
    store_region(out, flipped(values, flips, TURN, REGION), at, matrices, REGION)


@triton.jit
def product_apart(a, b):
    """A rounded product; a compiler would add to an unrounded one."""
    if INTERPRETED:
        return a * b
    else:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def flipped(x, flips, TURN: tl.constexpr, REGION: tl.constexpr):
    """Values times 1 or -1 for each element of a block, if they are given."""
    if flips is not None:
        x = x * tl.load(flips + tl.arange(0, REGION.width) % (1 << TURN.levels))[None, :]
    return x


@triton.jit
def load_runs(x, at, matrices, REGION: tl.constexpr):
    """Load a row of 16-bit values, of which a thread holds runs of 16 or 32: several loads each, because one reads at most 16 bytes.

    So blocks as long are summed or transformed within threads, which takes a tenth of the instructions of an exchange between them.
    """
    run = tl.arange(0, REGION.width // REGION.run)
    inside = (run < (matrices.columns - at.column) // REGION.run)[:, None] & (tl.arange(0, 8) < 8)[None, :]
    places = at.column + (REGION.run * run[:, None] + tl.arange(0, 8)[None, :])
    return tl.reshape(joined_loads(x, places, inside, REGION.run // 8), (1, REGION.width))


@triton.jit
def joined_loads(x, places, inside, COUNT: tl.constexpr):
    """Load `COUNT` times as many neighbours as there are places in a row, as rows."""
    if COUNT == 1:
        return tl.load(x + places, mask=inside, other=0)
    else:
        HALF: tl.constexpr = COUNT // 2
        first = joined_loads(x, places, inside, HALF)
        second = joined_loads(x + places.shape[1] * HALF, places, inside, HALF)
        return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (places.shape[0], places.shape[1] * COUNT))
