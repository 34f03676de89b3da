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
    words = [block & _WORD, block >> 32, torch.full_like(block, stream & _WORD), torch.full_like(block, (stream >> 32) & _WORD)]
    spare = [torch.empty_like(block), torch.empty_like(block)]
    key = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        words, spare = _round(words, spare, key)
        key = [(k + w) & _WORD for k, w in zip(key, _WEYL, strict=True)]
    return torch.stack(words, dim=1).bitwise_and_(_WORD)


def _round(words: list[Tensor], spare: list[Tensor], key: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """One round, in place: the multiplied words' storage becomes spare, the spare takes the products."""
    c0, c1, c2, c3 = words
    p0, p1 = spare
    torch.mul(c0, _MULTIPLIERS[0], out=p0)
    torch.mul(c2, _MULTIPLIERS[1], out=p1)
    torch.bitwise_right_shift(p1, 32, out=c0)
    torch.bitwise_right_shift(p0, 32, out=c2)
    c0.bitwise_xor_(c1).bitwise_xor_(key[0]).bitwise_and_(_WORD)
    c2.bitwise_xor_(c3).bitwise_xor_(key[1]).bitwise_and_(_WORD)
    return [c0, p1, c2, p0], [c1, c3]


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
    return elements >> ((16 if bits <= 16 else 32) - bits)


def noise(first: int, count: int, bits: int, correction: bool, seed: int, stream: int, device: torch.device) -> Tensor:
    """The elements' random integers as they are added: `NOISE_BITS` wide, with the correction behind their last bit."""
    drawn = random_bits(first, count, bits, seed, stream, device) << (NOISE_BITS - bits)
    return drawn.bitwise_or_(1 << (NOISE_BITS - 1 - bits)) if correction else drawn
