"""Random words that leave every element undecided after 16 bits, so that the last 16 decide.

Ordinary words leave one element in 65,536 undecided, and tests that draw them hardly see what the last bits do. Plain torch, given first
bits, says what they must be: the most with which an element is still rounded down. Philox is a bijection of counters for every key: it is
computed backwards from the words that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from qsim_kernels.torch.philox import ElementNoise
from support import philox_oracle

Words = Any

WORD = 0xFFFFFFFF


def counter_of(words: list[int], key: list[int]) -> list[int]:
    """The counter whose words are given, of Philox4x32-10."""
    multipliers = [int(x) for x in philox_oracle.MULTIPLIERS]
    bumps = [int(x) for x in philox_oracle.BUMPS]
    c0, c1, c2, c3 = words
    for step in reversed(range(10)):
        k0, k1 = ((key[i] + step * bumps[i]) & WORD for i in (0, 1))
        second, first = (low * pow(factor, -1, 1 << 32) & WORD for low, factor in ((c1, multipliers[1]), (c3, multipliers[0])))
        c0, c1, c2, c3 = first, c0 ^ second * multipliers[1] >> 32 ^ k0, second, c2 ^ first * multipliers[0] >> 32 ^ k1
    return [c0, c1, c2, c3]


def undecided(rounded: Callable[[], Tensor], first: int) -> Words:
    """The first 16 bits of elements with which all else depends on the last 16, from index 0 on.

    Args:
        rounded: Rounds the elements in plain torch.
        first: The index of the first of them.
    """

    def with_halves(halves: Words) -> Words:
        def drawn(noise: ElementNoise, blocks: int) -> Tensor:
            return torch.zeros_like(indices(noise)) if blocks else torch.from_numpy(halves[indices(noise).numpy()])

        with patch.object(ElementNoise, "_half_words", drawn):
            return rounded().reshape(-1).view(torch.uint8).numpy().reshape(-1, rounded().element_size())

    count = rounded().numel()
    halves = np.zeros(-(-(first + count) // 8) * 8, np.int64)
    down = with_halves(halves)
    for bit in reversed(range(16)):
        halves += 1 << bit
        halves[first : first + count] -= (1 << bit) * (with_halves(halves) != down).any(-1)
    return halves


def indices(noise: ElementNoise) -> Tensor:
    """The indices of the elements that noise is drawn for."""
    return torch.arange(noise.where, noise.where + noise.size) if isinstance(noise.where, int) else noise.where


class ForcedWords:
    """Counters in place of those of Philox blocks, for one seed.

    Args:
        seed: The seed.
        halves: The first 16 bits of elements, from index 0 on. In half of the blocks, some get another last one.
    """

    def __init__(self, seed: int, halves: Words) -> None:
        self.key = philox_oracle.words_of(seed, 2)
        self.halves = halves.reshape(-1, 8)
        #: The counter, as a block and a stream, of each block.
        self.counters: dict[int, tuple[int, int]] = {}

    def counter(self, block: int) -> tuple[int, int]:
        """The counter of a block: another block and a stream."""
        if block not in self.counters:
            # Programs at the end of a tensor have places for more elements.
            halves = [int(half) for half in self.halves[block]] if block < len(self.halves) else [0] * 8
            for changed in range(256):
                others = [half ^ (changed >> i & 1) for i, half in enumerate(halves)]
                low, high, *stream = counter_of([a | b << 16 for a, b in zip(others[::2], others[1::2], strict=True)], self.key)
                if not high >> 31:  # where the blocks of the last bits are
                    break
            else:
                raise ValueError(f"no counter in the first half has the words of block {block}")
            self.counters[block] = low | high << 32, stream[0] | stream[1] << 32
        return self.counters[block]

    def replace(self, blocks: list[Any], streams: list[Any]) -> None:
        """Put other counters into the registers of a text. Two blocks with one stream get words of which only the first's are forced."""
        first = blocks[0].copy()
        of_stream = np.empty_like(first)
        for at in np.ndindex(first.shape):
            blocks[0][at], of_stream[at] = self.counter(int(first[at]))
            if len(streams) < len(blocks):
                other = int(blocks[1][at])
                self.counters.setdefault(other, (other, int(of_stream[at])))
        if len(streams) == len(blocks):
            for block, stream in zip(blocks, streams, strict=True):
                assert (block == blocks[0]).all() or (block == first).all(), "a text draws one block"
                block[...], stream[...] = blocks[0], of_stream
        else:
            streams[0][...] = of_stream

    def half_words(self, noise: ElementNoise, blocks: int) -> Tensor:
        """The half words that `ElementNoise` draws for elements, with these counters."""
        where = indices(noise)
        late = philox_oracle.LAST if blocks else 0
        counters = [self.counters[block] for block in (where.reshape(-1) >> 3).tolist()]
        numbers = [philox_oracle.words_of(block | late, 2) + philox_oracle.words_of(stream, 2) for block, stream in counters]
        words = philox_oracle.philox(np.array(numbers, np.uint64), np.array(self.key, np.uint64))
        place = (where.reshape(-1) & 7).numpy()
        chosen = words[np.arange(len(words)), place >> 1] >> (16 * (place & 1)).astype(np.uint64) & philox_oracle.HALF
        return torch.from_numpy(chosen.astype(np.int64)).view(where.shape)

    @contextmanager
    def in_plain_torch(self, *, with_last: bool = True) -> Iterator[None]:
        """Let plain torch draw these words; without the last 16 bits of elements, if these are to be zero."""

        def drawn(noise: ElementNoise, blocks: int) -> Tensor:
            words = self.half_words(noise, blocks)
            return words if with_last or not blocks else torch.zeros_like(words)

        with patch.object(ElementNoise, "_half_words", drawn):
            yield
