"""The random bits that each element of a tensor gets, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.arithmetic.philox import LATE, SHARED, philox as philox_of
from qsim_kernels.meanings import torch as meaning

# Bits of a Philox block that each element gets, and the exponent of the number of elements that share one.
_HALF, _BLOCK = 16, SHARED.bit_length() - 1
# Where the blocks of the first and of the last bits begin.
_FIRST, _LAST = 0, LATE << 32

_WORD = 0xFFFFFFFF


#: A key: 64 bits, in a tensor where reading them would make the host wait for the device.
Key = int | Tensor


def key_of(seed: Tensor, x: Tensor) -> Key:
    """The key for a seed; on a tensor's GPU the seed itself, so that CUDA graphs read it at every replay."""
    return seed if seed.is_cuda and seed.device == x.device else int(seed)


def philox(first: int, count: int, seed: Key, stream: int, device: torch.device) -> Tensor:
    """The words of `count` consecutive counters.

    The key is `seed`; the counter is the block's number in its lower 64 bits and `stream` in its upper.

    Args:
        first: Number of the first block of four words, unsigned.
        count: Number of blocks.
        seed: The key.
        stream: 64 bits.
        device: Device to compute on.

    Returns:
        An int64 tensor of shape (count, 4) with values below 2**32.
    """
    upper, lower = first >> 32, first & _WORD
    block = torch.arange(lower, lower + count, dtype=torch.int64, device=device)
    # A word that is the same in all counters stays a plain number until the rounds have mixed it with the others.
    high: Tensor | int = upper & _WORD if lower + count - 1 <= _WORD else (block >> 32) + upper & _WORD
    return torch.stack(_words(block & _WORD, high, seed, stream), dim=1)


def block_words(block: int, seed: int, stream: int) -> tuple[int, int, int, int]:
    """The words of one counter: in plain numbers, forty times as fast as `philox` with a count of 1."""
    counter = block & _WORD, block >> 32 & _WORD, stream & _WORD, stream >> 32 & _WORD
    words: tuple[int, int, int, int] = philox_of(*counter, seed & _WORD, seed >> 32 & _WORD)  # type: ignore[no-untyped-call]
    return words


def _words(low: Tensor, high: Tensor | int, seed: Key, stream: int) -> tuple[Tensor, ...]:
    """The words of the counters with the given lower halves."""
    return meaning.philox(low, high, stream & _WORD, stream >> 32 & _WORD, seed & _WORD, seed >> 32 & _WORD)


def _half_words(first: int, count: int, seed: Key, stream: int, device: torch.device, blocks: int) -> Tensor:
    """The half words of `count` elements starting at `first`, from the Philox blocks starting at number `blocks`."""
    block, skip = divmod(first, SHARED)
    words = philox(blocks + block, -(-(skip + count) // SHARED), seed, stream, device)
    return _halves(words).reshape(-1)[skip : skip + count]


def _half_words_at(where: Tensor, seed: Key, stream: int, blocks: int) -> Tensor:
    """The half words of elements with the given logical indices, which need not be consecutive: one block of words each."""
    block, place = where >> _BLOCK, where & SHARED - 1
    first, second, third, last = _words(block & _WORD, (block >> 32) + (blocks >> 32), seed, stream)
    word = torch.where(place < 4, torch.where(place < 2, first, second), torch.where(place < 6, third, last))
    return word >> (place & 1) * _HALF & 0xFFFF


def _halves(words: Tensor) -> Tensor:
    return torch.stack([words & 0xFFFF, words >> 16], dim=2)


class ElementNoise(NamedTuple):
    """The source of some elements' random bits: 32 each, the first 16 and the last 16 from different Philox blocks.

    Attributes:
        seed: The key.
        stream: 64 bits.
        where: Logical index of the first of consecutive elements, or the indices of all elements.
        size: Number of consecutive elements.
        device: Device to compute their bits on.
    """

    seed: Key
    stream: int
    where: int | Tensor
    size: int = 0
    device: torch.device = torch.device("cpu")

    def first_bits(self) -> Tensor:
        """The first 16 bits of each element, as int64."""
        return self._half_words(_FIRST)

    def last_bits(self) -> Tensor:
        """The last 16 bits of each element, as int64."""
        return self._half_words(_LAST)

    def of(self, chosen: Tensor) -> ElementNoise:
        """The noise of the elements at the given positions."""
        where = self.where + chosen if isinstance(self.where, int) else self.where[chosen]
        return self._replace(where=where)

    def _half_words(self, blocks: int) -> Tensor:
        if isinstance(self.where, int):
            return _half_words(self.where, self.size, self.seed, self.stream, self.device, blocks)
        return _half_words_at(self.where, self.seed, self.stream, blocks)


def random_bits(noise: ElementNoise, bits: int) -> Tensor:
    """The random integer of each element: its first `bits` bits, as int64."""
    if bits <= _HALF:
        return noise.first_bits() >> _HALF - bits
    return (noise.first_bits() << _HALF | noise.last_bits()) >> 2 * _HALF - bits
