"""Hadamard transforms inside a kernel; the additions and their order are those of `reference.hadamard`."""

from typing import NamedTuple

import triton
import triton.language as tl


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
def hadamard(x, signs, T: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Transform a region of float32 values.

    Args:
        x: The values, `HEIGHT` by `WIDTH`.
        signs: One bit per element of a block: whether its sign is flipped.
        T: The `TurnVariant`.
        HEIGHT: Rows.
        WIDTH: Columns.
    """
    if T.levels > 0:
        LEVELS: tl.constexpr = T.levels
        SIZE: tl.constexpr = 1 << LEVELS
        FACTOR: tl.constexpr = T.factor
        INNER: tl.constexpr = WIDTH if T.down else 1
        if not T.bounded:
            LARGEST: tl.constexpr = 3.4028234663852886e38 / SIZE
            x = tl.where(tl.abs(x) < float("inf"), tl.maximum(tl.minimum(x, LARGEST), -LARGEST), x)
        place = tl.arange(0, HEIGHT if T.down else WIDTH) % SIZE
        flips = (signs >> place) << 31
        flips = flips[:, None] if T.down else flips[None, :]
        x = (x.to(tl.int32, bitcast=True) ^ flips).to(tl.float32, bitcast=True)
        for level in tl.static_range(LEVELS):
            pairs = tl.reshape(x, (HEIGHT * WIDTH // (INNER << (level + 1)), 2, INNER << level))
            first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
            pairs = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
            x = tl.reshape(pairs, (HEIGHT, WIDTH))
        x *= FACTOR
    return x
