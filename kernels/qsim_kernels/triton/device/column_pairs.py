"""Stochastic rounding of bfloat16 matrices that are stored transposed, two neighbours in memory per instruction; see `pairs`.

They are in two columns, each of which has its random bits in logical order: eight elements down a column share a Philox block. A thread
rounds eight such pairs, and so needs two blocks, without exchanging words with others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.triton.device.pairs import (
    COMMON,
    PAIRS,
    Ends,
    Registers,
    in_both_halves,
    in_columns,
    pair_as_powers,
    registers,
    split,
    text,
)
from qsim_kernels.triton.device.rounding import INFINITY, end_of_additions
from qsim_kernels.triton.device.scaled_pairs import limits_of

#: Rows of the pairs that a thread rounds together.
RUN: tl.constexpr = tl.constexpr(2 * PAIRS)
_OPERANDS = {"x": ("r", 2 * PAIRS)} | {name: (kind, 1) for name, kind in COMMON.items()} | {"block": ("l", 2), "end": ("r", 1)}
_NONFINITE_OPERANDS = _OPERANDS | dict.fromkeys(("factor", "top", "is_infinite"), ("r", 1))


def _clamped(i: int, half: int, of: Registers) -> list[str]:
    # NaN stays one, and with it all that is computed from it.
    return [f"min.NaN.xorsign.abs.bf16x2 pair{i}, {of['x'][i]}, {of['end'][0]};", *split(f"pair{i}", half)]


def _written(i: int, of: Registers) -> list[str]:
    return [f"lop3.b32 ${i}, rounded, pair{i}, 0x80008000, 0xF8;"]


def _nonfinite(i: int, of: Registers) -> list[str]:
    """PTX that adds what exceeds the largest value, times so large a number that it is infinite, and then one or zero."""
    return [
        f"fma.rn.relu.bf16x2 bits, rounded, {of['factor'][0]}, {of['top'][0]};",
        "mov.b32 random, 0x7F007F00;",
        "mul.bf16x2 bits, bits, random;",
        *(f"lop3.b32 {each}, {each}, pair{i}, 0x80008000, 0xF8;" for each in ("bits", "rounded")),
        f"fma.rn.bf16x2 ${i}, bits, {of['is_infinite'][0]}, rounded;",
    ]


_of, _constraints = registers(2 * PAIRS, _OPERANDS)
SATURATING: tl.constexpr = tl.constexpr(text(Ends(_clamped, pair_as_powers, _written), _of, in_columns, 2 * PAIRS))
SATURATING_CONSTRAINTS: tl.constexpr = tl.constexpr(_constraints)
_of, _constraints = registers(2 * PAIRS, _NONFINITE_OPERANDS)
NONFINITE: tl.constexpr = tl.constexpr(text(Ends(_clamped, pair_as_powers, _nonfinite), _of, in_columns, 2 * PAIRS))
NONFINITE_CONSTRAINTS: tl.constexpr = tl.constexpr(_constraints)


@triton.jit
def rounded_columns(x, left, right, noise, grid, ROUNDING: tl.constexpr):
    """Round eight pairs of bfloat16.

    Args:
        x: The pairs as a tuple.
        left: The number of the Philox block of their first elements.
        right: That of their second ones.
        noise: A `Noise`.
        grid: `GridNumbers`; for which grids, `arguments.has_column_pairs` decides.
        ROUNDING: The `KernelVariant`.

    Returns:
        The rounded pairs as a tuple.
    """
    PAIRS_OF: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32)
    lift, lowest, largest = limits_of(grid)
    given = x + (left, right, noise.seed, noise.stream, lift, lowest)  # noqa: RUF005 (Triton has no stars)
    if ROUNDING.saturates:
        given = given + (largest,)  # noqa: RUF005
        return tl.inline_asm_elementwise(SATURATING, SATURATING_CONSTRAINTS, given, dtype=PAIRS_OF, is_pure=True, pack=1)
    else:
        # The power of two that takes the largest value near 2**60, from where what exceeds it becomes infinite times 2**127.
        power = 127 + 187 - (grid.top >> 23)
        top = -0x8000 | 187 << 7 | ((grid.top >> 16) & 0x7F)
        end = end_of_additions(grid, ROUNDING)
        given = given + (in_both_halves(end >> 16), in_both_halves(power << 7), in_both_halves(top & 0xFFFF))  # noqa: RUF005
        given = given + (tl.where(grid.over == INFINITY, 0x3F803F80, 0),)  # noqa: RUF005
        return tl.inline_asm_elementwise(NONFINITE, NONFINITE_CONSTRAINTS, given, dtype=PAIRS_OF, is_pure=True, pack=1)
