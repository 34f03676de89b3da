"""Philox4x32-10 in plain torch, and the random bits that each element of a tensor gets from it.

Every 32-bit word lives in an int64, so that one multiplication holds both halves of a product. Bits above the 32nd may be left over from
the steps before; they are cleared where a word is multiplied next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.carrier import NOISE_BITS

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(first: int, count: int, seed: int, stream: int, device: torch.device) -> Tensor:
    """The words of `count` consecutive counters.

    The key is `seed`; the counter is the block's number in its lower 64 bits and `stream` in its upper.

    Args:
        first: Number of the first block of four words.
        count: How many blocks.
        seed: 64 bits.
        stream: 64 bits.
        device: Where to compute them.

    Returns:
        An int64 tensor of shape (count, 4) with values below 2**32.
    """
    block = torch.arange(first, first + count, dtype=torch.int64, device=device)
    upper = (first >> 32) & _WORD
    # A word that is the same in all counters stays a plain number until the rounds have mixed it with the others.
    high: Tensor | int = upper if (first + count - 1) >> 32 == first >> 32 else block >> 32
    return _mixed(block & _WORD, high, seed, stream)


def _mixed(low: Tensor, high: Tensor | int, seed: int, stream: int) -> Tensor:
    """The words of the counters with these lower halves."""
    words: tuple[Tensor | int, ...] = (low, high, stream & _WORD, (stream >> 32) & _WORD)
    key = (seed & _WORD, (seed >> 32) & _WORD)
    for _ in range(10):
        words = _round(words, key)
        key = ((key[0] + _WEYL[0]) & _WORD, (key[1] + _WEYL[1]) & _WORD)
    c0, c1, c2, c3 = words
    c1 &= _WORD
    c3 &= _WORD
    return torch.stack([c0, c1, c2, c3], dim=1)  # type: ignore[list-item]


def _round(words: tuple[Tensor | int, ...], key: tuple[int, int]) -> tuple[Tensor | int, ...]:
    """One round. The operators work in place on tensors, and on numbers as on any."""
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
    """The product itself, where its upper half does no harm."""
    return product & _WORD if isinstance(product, int) else product


def random_bits(first: int, count: int, bits: int, seed: int, stream: int, device: torch.device) -> Tensor:
    """The random integer of each of `count` elements from `first` on.

    Up to 16 bits are cut from the top of half a word, so that a block serves eight elements; more from the top of a word, for four.

    Args:
        first: Logical index of the first element.
        count: How many elements.
        bits: How many random bits an element uses.
        seed: 64 bits.
        stream: 64 bits.
        device: Where to compute them.

    Returns:
        An int64 tensor of `count` values below `2**bits`.
    """
    served = 8 if bits <= 16 else 4
    block, skip = divmod(first, served)
    words = philox(block, -(-(skip + count) // served), seed, stream, device)
    if bits <= 16:
        words = torch.stack([words & 0xFFFF, words >> 16], dim=2)
    elements = words.reshape(-1)[skip : skip + count]
    spare = (16 if bits <= 16 else 32) - bits
    return elements >> spare if spare else elements


def noise(first: int, count: int, bits: int, correction: bool, seed: int, stream: int, device: torch.device) -> Tensor:
    """The elements' random integers as they are added: `NOISE_BITS` wide, with the correction behind their last bit."""
    return _as_added(random_bits(first, count, bits, seed, stream, device), bits, correction)


def _as_added(drawn: Tensor, bits: int, correction: bool) -> Tensor:
    drawn = drawn.bitwise_left_shift_(NOISE_BITS - bits)
    return drawn.bitwise_or_(1 << (NOISE_BITS - 1 - bits)) if correction else drawn


def noise_at(where: Tensor, bits: int, correction: bool, seed: int, stream: int) -> Tensor:
    """`noise` of the elements with these logical indices, which need not follow one another: a block of words for each."""
    served = 8 if bits <= 16 else 4
    block = where // served
    words = _mixed(block & _WORD, block >> 32, seed, stream)
    if bits <= 16:
        words = torch.stack([words & 0xFFFF, words >> 16], dim=2).view(-1, served)
    drawn = words.gather(1, (where % served).view(-1, 1)).view(-1)
    return _as_added(drawn >> (16 if bits <= 16 else 32) - bits, bits, correction)
