"""Stochastic codes of bfloat16 values, two elements per instruction; see `pairs`.

A rounded value times a power of two has the exponent of its code in bfloat16, where the grid's subnormal values become subnormal numbers.
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
    pair_as_powers,
    registers,
    split,
    text,
)
from qsim_kernels.triton.placement import Placement

_RESULTS = 2
_OWN = {"top": "r", "nan": "r", "unit": "r", "factor": "r", "narrower": "r"}
_OPERANDS = {"x": ("r", PAIRS)} | {name: (kind, 2 * PAIRS) for name, kind in (COMMON | _OWN).items()}


def _clamped(i: int, half: int, of: Registers) -> list[str]:
    # Magnitudes above the largest value become that, and NaN the positive one with all bits set. The sign stays.
    return [f"min.NaN.xorsign.abs.bf16x2 pair{i}, {of['x'][i]}, {of['top'][0]};", *split(f"pair{i}", half)]


def _repaired(i: int, half: int, of: Registers) -> list[str]:
    """PTX for an element that is the number whose code NaN has, if it is NaN."""
    magnitudes = [f"and.b32 bits, pair{i}, 0x7FFF7FFF;", f"min.u16x2 bits, bits, {of['nan'][0]};"]
    return [*_clamped(i, half, of), *magnitudes, f"lop3.b32 pair{i}, bits, pair{i}, 0x80008000, 0xF8;", *split(f"pair{i}", half)]


def _in_bytes(i: int, of: Registers) -> list[str]:
    """PTX for codes that fill a byte each: magnitudes, from the second bits of both halves on, behind signs."""
    lines = [f"mul.bf16x2 rounded, rounded, {of['unit'][0]};", f"mul.lo.u32 power{i}, rounded, {of['factor'][0]};"]
    lines.append(f"lop3.b32 power{i}, 0x7FFF7FFF, power{i}, pair{i}, 0xCA;")
    return [*lines, f"prmt.b32 ${i // 2}, power{i - 1}, power{i}, 0x7531;"] if i % 2 else lines


def _narrow(i: int, of: Registers) -> list[str]:
    """PTX for codes that do not; the bits behind them are zero."""
    return _in_bytes(i, of) + ([f"shr.u32 ${i // 2}, ${i // 2}, {of['narrower'][0]};"] if i % 2 else [])


_of, _constraints = registers(_RESULTS, _OPERANDS)
_IN_THREADS = Placement(thread=2 * PAIRS)
NARROW: tl.constexpr = tl.constexpr(_IN_THREADS.mark(text(Ends(_clamped, pair_as_powers, _narrow, _repaired), _of)))
IN_BYTES: tl.constexpr = tl.constexpr(_IN_THREADS.mark(text(Ends(_clamped, pair_as_powers, _in_bytes, _repaired), _of)))
CONSTRAINTS: tl.constexpr = tl.constexpr(_constraints)


@triton.jit
def codes_of_pairs(x, drawn, grid, coding, FILLS_BYTE: tl.constexpr):
    """Round bfloat16 values stochastically and return their codes.

    Args:
        x: bfloat16 values, of which a thread holds eight neighbours of one Philox block.
        drawn: `Words`.
        grid: `GridNumbers`; for which grids, `arguments.has_pairs` decides.
        coding: `Codes`.
        FILLS_BYTE: Whether codes have eight bits.
    """
    # Mantissa bits that are rounded away.
    lost = grid.shift - 16
    narrower = coding.unused - 24
    nan = in_both_halves((coding.nan << lost) + (grid.low - 1 << 7))
    lift = in_both_halves(lost << 7)
    # The smallest normal number divided by the grid's smallest normal value.
    unit = in_both_halves((128 - grid.low) << 7)
    return tl.inline_asm_elementwise(
        IN_BYTES if FILLS_BYTE else NARROW, CONSTRAINTS,
        [
            x, drawn.block, drawn.seed, drawn.stream, lift, in_both_halves(grid.low << 7) + lift,
            in_both_halves(grid.top >> 16), nan, unit, 256 >> lost << narrower, narrower,
        ],
        dtype=tl.uint8, is_pure=True, pack=8,
    )  # fmt: skip
