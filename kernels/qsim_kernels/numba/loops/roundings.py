"""Roundings as `arithmetic.rounding` defines them, for the loops: a function for each variant, the numbers that it reads, and random bits.

Consecutive elements get words of 32 bits, or the first 16 of each; see `qsim_kernels.arithmetic.philox`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from qsim_kernels.arithmetic.philox import LATE, SHARED
from qsim_kernels.meanings import numba as meaning
from qsim_kernels.meanings.numba import philox
from qsim_kernels.numba.jobs import StripNumbers
from qsim_kernels.numba.loops.bits import inlined, part, record_at, types, u32, u64
from qsim_kernels.numbers.carrier import DOUBLE, GridNumbers, RoundingNumbers, UsedBits, Variant
from qsim_kernels.numbers.grid import Mode, Overflow

#: Functions that read a `RoundingNumbers` in float32's and in float64's bits, and one that reads the `StripNumbers` of float32's.
single_at = record_at(RoundingNumbers, {GridNumbers: types.int32, UsedBits: types.uint32})
strip_at = record_at(StripNumbers, {GridNumbers: types.int32, UsedBits: types.uint32})
double_at = record_at(RoundingNumbers, {GridNumbers: types.int64, UsedBits: types.uint64})

#: `round_bits` and `random_bits` for a carrier's bits and a variant; they do not read their parameter `variant`.
functions = cache(meaning.rounding)


def of_sums(mode: Mode) -> Any:
    """`round_bits` onto the floats that matrix units add in, as float64."""
    wide = Variant(int(mode), int(Overflow.NONFINITE), flat=False, zero=True, signed=True, keep_sign=True, symmetric=True, open=False)
    return functions(DOUBLE, wide).round_bits


_WORD, _LATE, _32 = u64(0xFFFFFFFF), u64(LATE << 32), u64(32)
_HALF, _16 = u64(0xFFFF), u64(16)


@inlined
def _words(block, seed, stream):
    """The four words of a block."""
    return philox(block & _WORD, block >> _32, stream & _WORD, stream >> _32, seed & _WORD, seed >> _32)


@part
def draw(drawn, blocks, first, seed, stream):
    """Write the 32 random bits of the elements of some blocks.

    Args:
        drawn: Room for `SHARED * blocks` words.
        blocks: Number of blocks.
        first: Number of the first block.
        seed: 64 bits.
        stream: 64 bits.
    """
    for j in range(blocks):
        block, at = first + u64(j), SHARED * j
        a0, a1, a2, a3 = _words(block, seed, stream)
        b0, b1, b2, b3 = _words(block | _LATE, seed, stream)
        drawn[at], drawn[at + 1] = u32((a0 & _HALF) << _16 | (b0 & _HALF)), u32(a0 >> _16 << _16 | b0 >> _16)
        drawn[at + 2], drawn[at + 3] = u32((a1 & _HALF) << _16 | (b1 & _HALF)), u32(a1 >> _16 << _16 | b1 >> _16)
        drawn[at + 4], drawn[at + 5] = u32((a2 & _HALF) << _16 | (b2 & _HALF)), u32(a2 >> _16 << _16 | b2 >> _16)
        drawn[at + 6], drawn[at + 7] = u32((a3 & _HALF) << _16 | (b3 & _HALF)), u32(a3 >> _16 << _16 | b3 >> _16)


@part
def draw_first(words, blocks, first, seed, stream):
    """Write the words that hold the first 16 bits of the elements of some blocks, in the elements' order; see `draw` for the arguments."""
    for j in range(blocks):
        a, b, c, d = _words(first + u64(j), seed, stream)
        words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3] = u32(a), u32(b), u32(c), u32(d)
