"""Philox4x32-10, in plain Python, and the random integers that stochastic rounding compares."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.random.seeds import check_index, check_source
from qsim_kernels import torch as reference
from qsim_kernels.arithmetic.philox import philox


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of one counter, in plain Python: the definition that all operators share.

    Args:
        counter: Four 32-bit words.
        key: Two 32-bit words.

    Raises:
        TypeError: If a word is no integer.
        ValueError: If there are more or fewer words, or one has more than 32 bits.

    Example:
        >>> from qsim.random import philox4x32
        >>> [hex(word) for word in philox4x32((0, 0, 0, 0), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    for name, given, count in (("counter", counter, 4), ("key", key, 2)):
        if len(given) != count:
            raise ValueError(f"philox4x32: {name} has {count} words, got {given!r}")
        for word in given:
            if isinstance(word, bool) or not isinstance(word, int):
                raise TypeError(f"philox4x32: the words of {name} must be ints, got {word!r}")
            if not 0 <= word < 2**32:
                raise ValueError(f"philox4x32: the words of {name} must be in 0…2**32 - 1, got {word}")
    words: tuple[int, int, int, int] = philox(*counter, *key)  # type: ignore[no-untyped-call]
    return words


def random_bits(
    count: int, bits: int, *, seed: int | Tensor, stream: int = 0, offset: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the random integers that stochastic rounding with `bits` random bits uses for `count` elements.

    Args:
        count: Number of elements.
        bits: Random bits per element, 1 to 32.
        seed: The seed.
        stream: The seed's stream.
        offset: Logical index of the first element.
        device: Where to compute them.

    Returns:
        An int64 tensor of values below `2**bits`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range.

    Example:
        >>> import qsim
        >>> qsim.random.random_bits(3, 32, seed=0)
        tensor([3906276559, 1713873586, 3314386802])
    """
    check_index(stream, offset)
    for name, number in (("count", count), ("bits", bits)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be an int, got {number!r}")
    if not 1 <= bits <= 32:
        raise ValueError(f"bits must be in 1…32, got {bits}")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    place = torch.device(device)
    check_source(seed, None, place)
    return reference.random_bits(reference.ElementNoise(int(seed), stream, offset, count, place), bits)
