"""Philox4x32-10 in plain torch, and the random bits that each element of a tensor gets from it.

Every 32-bit word is stored in an int64, so that one multiplication gives both halves of a product. Bits above the 32nd may be left over
from earlier steps; they are cleared before a word is multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.carrier import NOISE_BITS

# Elements that share a Philox block, and the bits of it that each gets.
_SERVED, _HALF = 8, 16
# Where the blocks of the first and of the last bits begin. They are too far apart for any element's index to overlap.
_FIRST, _LAST = 0, 1 << 63

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(first: int, count: int, seed: int, stream: int, device: torch.device) -> Tensor:
    """The words of `count` consecutive counters.

    The key is `seed`; the counter is the block's number in its lower 64 bits and `stream` in its upper.

    Args:
        first: Number of the first block of four words, unsigned.
        count: Number of blocks.
        seed: 64 bits.
        stream: 64 bits.
        device: Device to compute on.

    Returns:
        An int64 tensor of shape (count, 4) with values below 2**32.
    """
    upper, lower = first >> 32, first & _WORD
    block = torch.arange(lower, lower + count, dtype=torch.int64, device=device)
    # A word that is the same in all counters stays a plain number until the rounds have mixed it with the others.
    high: Tensor | int = upper & _WORD if lower + count - 1 <= _WORD else (block >> 32) + upper & _WORD
    return _mixed(block & _WORD, high, seed, stream)


def block_words(block: int, seed: int, stream: int) -> tuple[int, int, int, int]:
    """The words of one counter: in plain numbers, forty times as fast as `philox` with a count of 1."""
    return _rounds(block & _WORD, block >> 32 & _WORD, seed, stream)  # type: ignore[return-value]


def _mixed(low: Tensor, high: Tensor | int, seed: int, stream: int) -> Tensor:
    """The words of the counters with the given lower halves."""
    return torch.stack(_rounds(low, high, seed, stream), dim=1)  # type: ignore[arg-type]


def _rounds(low: Tensor | int, high: Tensor | int, seed: int, stream: int) -> tuple[Tensor | int, ...]:
    """The four words after ten rounds."""
    words: tuple[Tensor | int, ...] = (low, high, stream & _WORD, (stream >> 32) & _WORD)
    key = (seed & _WORD, (seed >> 32) & _WORD)
    for _ in range(10):
        words = _round(words, key)
        key = ((key[0] + _WEYL[0]) & _WORD, (key[1] + _WEYL[1]) & _WORD)
    c0, c1, c2, c3 = words
    c1 &= _WORD
    c3 &= _WORD
    return c0, c1, c2, c3


def _round(words: tuple[Tensor | int, ...], key: tuple[int, int]) -> tuple[Tensor | int, ...]:
    """One Philox round. In-place operators update tensors in place and rebind plain numbers."""
    c0, c1, c2, c3 = words
    p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
    high0, high1 = p0 >> 32, p1 >> 32
    high1 ^= c1
    high1 ^= key[0]
    high1 &= _WORD
    high0 ^= c3
    high0 ^= key[1]
    high0 &= _WORD
    return high1, _low(p1), high0, _low(p0)


def _low(product: Tensor | int) -> Tensor | int:
    """The lower half of a product; leaves the upper bits uncleared where they are harmless."""
    return product & _WORD if isinstance(product, int) else product


def _half_words(first: int, count: int, seed: int, stream: int, device: torch.device, blocks: int) -> Tensor:
    """The half words of `count` elements starting at `first`, from the Philox blocks starting at number `blocks`."""
    block, skip = divmod(first, _SERVED)
    words = philox(blocks + block, -(-(skip + count) // _SERVED), seed, stream, device)
    return _halves(words).reshape(-1)[skip : skip + count]


def _half_words_at(where: Tensor, seed: int, stream: int, blocks: int) -> Tensor:
    """The half words of elements with the given logical indices, which need not be consecutive: one block of words each."""
    block = where // _SERVED
    words = _mixed(block & _WORD, (block >> 32) + (blocks >> 32), seed, stream)
    return _halves(words).view(-1, _SERVED).gather(1, (where % _SERVED).view(-1, 1)).view(-1)


def _halves(words: Tensor) -> Tensor:
    return torch.stack([words & 0xFFFF, words >> 16], dim=2)


class ElementNoise(NamedTuple):
    """The source of some elements' random bits: 32 each, the first 16 and the last 16 from different Philox blocks.

    Attributes:
        seed: 64 bits.
        stream: 64 bits.
        where: Logical index of the first of consecutive elements, or the indices of all elements.
        size: Number of elements.
        device: Device to compute on.
    """

    seed: int
    stream: int
    where: int | Tensor
    size: int
    device: torch.device

    def first_bits(self) -> Tensor:
        """The first 16 bits of each element, as int64."""
        return self._half_words(_FIRST)

    def last_bits(self) -> Tensor:
        """The last 16 bits of each element, as int64."""
        return self._half_words(_LAST)

    def of(self, chosen: Tensor) -> ElementNoise:
        """The noise of the elements at the given positions."""
        where = self.where[chosen] if isinstance(self.where, Tensor) else self.where + chosen
        return self._replace(where=where, size=chosen.numel())

    def _half_words(self, blocks: int) -> Tensor:
        if isinstance(self.where, Tensor):
            return _half_words_at(self.where, self.seed, self.stream, blocks)
        return _half_words(self.where, self.size, self.seed, self.stream, self.device, blocks)


def random_bits(noise: ElementNoise, bits: int) -> Tensor:
    """The random integer of each element: its first `bits` bits, as int64."""
    if bits <= _HALF:
        return noise.first_bits() >> _HALF - bits
    return (noise.first_bits() << _HALF | noise.last_bits()) >> 2 * _HALF - bits


def as_added(drawn: Tensor, bits: int, correction: bool) -> Tensor:
    """Widen random integers of `bits` bits to the `NOISE_BITS` used in additions, with the correction below their last bit."""
    drawn = drawn << NOISE_BITS - bits
    return drawn.bitwise_or_(1 << (NOISE_BITS - 1 - bits)) if correction else drawn
