"""Random bits from the paper alone: Philox4x32-10 (Salmon et al., 2011, section 3.3), and which of its bits an element gets.

Everything is NumPy's integers of 64 bits, of which a word is the lower half. Nothing here comes from the library.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

#: Philox4x32's two multipliers; what a round adds to the two words of the key (the golden ratio, and the square root of 3, less 1).
MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
BUMPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
WORD, HALF = np.uint64(0xFFFFFFFF), np.uint64(0xFFFF)
#: Elements that a block serves, with half a word each; what is added to the number of the block with their last bits.
SERVED, LAST = 8, 1 << 63


def philox(counters: Words, key: Words, rounds: int = 10) -> Words:
    """The four words of each counter.

    Args:
        counters: Four words each, of shape [count, 4].
        key: Two words.
        rounds: Number of rounds.
    """
    right, left, key = counters[:, [0, 2]], counters[:, [1, 3]], key.copy()
    for _ in range(rounds):
        products = right * MULTIPLIERS
        # The upper half of each product meets the other pair's left word; pairs change places.
        right, left = (products >> np.uint64(32))[:, ::-1] ^ left ^ key, (products & WORD)[:, ::-1]
        key = (key + BUMPS) & WORD
    return np.stack([right[:, 0], left[:, 0], right[:, 1], left[:, 1]], axis=1)


def words_of(number: int, count: int) -> list[int]:
    """A number, negative ones as in two's complement, as words, the lowest first."""
    return [number >> 32 * i & 0xFFFFFFFF for i in range(count)]


def random_integers(count: int, bits: int, seed: int, stream: int = 0, offset: int = 0) -> list[int]:
    """The random integers of consecutive elements: the first 16 bits of each from one block, the last 16 from one far away."""
    first, end = offset // SERVED, (offset + count + SERVED - 1) // SERVED
    key = np.array(words_of(seed, 2), np.uint64)
    halves = []
    for far in (0, LAST):
        counters = np.array([words_of(block + far, 2) + words_of(stream, 2) for block in range(first, end)], np.uint64).reshape(-1, 4)
        words = philox(counters, key)
        halves.append(np.stack([words & HALF, words >> np.uint64(16)], axis=2).reshape(-1)[offset % SERVED :][:count])
    drawn = halves[0] << np.uint64(16) | halves[1]
    result: list[int] = (drawn >> np.uint64(32 - bits)).tolist()
    return result


def block(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The words of one counter."""
    return tuple(philox(np.array([counter], np.uint64), np.array(key, np.uint64))[0].tolist())


def stream(*names: str | int) -> int:
    """A stream by its names: 63 bits of BLAKE2b of their text as a tuple."""
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "little") & (1 << 63) - 1
