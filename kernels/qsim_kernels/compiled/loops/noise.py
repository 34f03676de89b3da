"""The random bits of consecutive elements; see `qsim_kernels.reference.philox`."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.carrier import NOISE_BITS
from qsim_kernels.compiled.loops.bits import inlined, part

#: Elements that share a Philox block.
SERVED = 8
_NOISE = NOISE_BITS
_u64: Any = np.uint64
_u32: Any = np.uint32
_WORD, _HALF, _LAST = _u64(0xFFFFFFFF), _u64(0xFFFF), _u64(1 << 63)
_16, _32 = _u64(16), _u64(32)


@part
def draw(noise, blocks, first, seed, stream, bits, correction):
    """Write the result of `as_added` for the elements of some blocks.

    Args:
        noise: Room for `SERVED * blocks` numbers.
        blocks: Number of blocks.
        first: Number of the first block.
        seed: 64 bits.
        stream: 64 bits.
        bits: Number of random bits that an element uses.
        correction: See `Rule`.
    """
    for j in range(blocks):
        block = first + _u64(j)
        a0, a1, a2, a3 = _philox(block, seed, stream)
        b0, b1, b2, b3 = _philox(block | _LAST, seed, stream)
        at = SERVED * j
        noise[at], noise[at + 1] = (a0 & _HALF) << _16 | (b0 & _HALF), a0 >> _16 << _16 | b0 >> _16
        noise[at + 2], noise[at + 3] = (a1 & _HALF) << _16 | (b1 & _HALF), a1 >> _16 << _16 | b1 >> _16
        noise[at + 4], noise[at + 5] = (a2 & _HALF) << _16 | (b2 & _HALF), a2 >> _16 << _16 | b2 >> _16
        noise[at + 6], noise[at + 7] = (a3 & _HALF) << _16 | (b3 & _HALF), a3 >> _16 << _16 | b3 >> _16
    dropped, behind = _u64(32 - bits), _u64(_NOISE - bits)
    corrected = _u64(1) << _u64(_NOISE - 1 - bits) if correction else _u64(0)
    for i in range(SERVED * blocks):
        noise[i] = noise[i] >> dropped << behind | corrected


@part
def draw_first(words, blocks, first, seed, stream):
    """Write the words that hold the first 16 bits of the elements of some blocks, in the elements' order; see `draw` for the arguments."""
    for j in range(blocks):
        a, b, c, d = _philox(first + _u64(j), seed, stream)
        words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3] = _u32(a), _u32(b), _u32(c), _u32(d)


@inlined
def _philox(block, seed, stream):
    """The four words of a counter, after ten rounds of Philox4x32."""
    c0, c1, c2, c3 = block & _WORD, block >> _32, stream & _WORD, stream >> _32
    k0, k1 = seed & _WORD, seed >> _32
    for _ in range(10):
        p0, p1 = c0 * _u64(0xD2511F53), c2 * _u64(0xCD9E8D57)
        c0, c1, c2, c3 = p1 >> _32 ^ c1 ^ k0, p1 & _WORD, p0 >> _32 ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _u64(0x9E3779B9)) & _WORD, (k1 + _u64(0xBB67AE85)) & _WORD
    return c0, c1, c2, c3
