"""Hadamard transforms of blocks along a dimension, in plain torch; see `scales.Turn`.

`arithmetic.hadamard` defines them. Here all blocks are transformed together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from qsim_kernels.arithmetic import hadamard as definition
from qsim_kernels.meanings import torch as meaning
from qsim_kernels.numbers.scales import Turn


def hadamard(x: Tensor, turn: Turn) -> Tensor:
    """Transform a tensor, in float32, or in float64 for float64 input."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if not x.numel():
        return x.new_empty(x.shape, dtype=dtype)
    whole = bounded(x.contiguous().view(-1, turn.length, turn.inner).to(dtype, copy=True), x.dtype, turn.size)
    signs = signs_on(x.device, dtype, turn._replace(length=0, inner=0))  # the signs do not depend on these
    for start, stop, size in pieces(turn):
        blocks = whole[:, start:stop].unflatten(1, (-1, size))
        first = start % turn.size
        whole[:, start:stop] = _transformed(blocks * signs[first : first + size]).flatten(1, 2)
    return whole.view(x.shape)


def turned_back(x: Tensor, turn: Turn, transform: Callable[[Tensor, Turn], Tensor] = hadamard) -> Tensor:
    """Undo a transform: Sylvester's matrix and the signs are their own inverses, so the signs are applied after it instead of before it.

    Args:
        x: A transformed tensor.
        turn: The transform.
        transform: The function that transforms, as `hadamard` does.
    """
    turned = transform(x, turn._replace(signs=-1))
    if not x.numel():
        return turned.view(x.shape)
    # Signs are changed as bits: `qsim.fpu` would round a product.
    bits = torch.int64 if turned.dtype == torch.float64 else torch.int32
    flips = (_negative(signs_of(turn), x.device) * torch.iinfo(bits).min).to(bits)
    along = flips.repeat(-(-turn.length // turn.size))[: turn.length, None]
    return (turned.view(bits).view(-1, turn.length, turn.inner) ^ along).view(turned.dtype).view(x.shape)


def flipped(x: Tensor, turn: Turn, flips: Tensor | None) -> Tensor:
    """A tensor whose elements are multiplied by the numbers of a block's, 1 or -1, if these are given."""
    if flips is None:
        return x
    along = flips.to(x.dtype).repeat(-(-turn.length // turn.size))[: turn.length, None]
    return (x.view(-1, turn.length, turn.inner) * along).view(x.shape)


def _negative(signs: Sequence[int], device: torch.device) -> Tensor:
    """1 for negative signs and 0 for others, from numbers instead of a copy to the device, which a CUDA graph cannot contain."""
    places = torch.arange(min(len(signs), 32), device=device)
    words = [sum((sign < 0) << place for place, sign in enumerate(signs[i : i + 32])) for i in range(0, len(signs), 32)]
    return torch.cat([word >> places & 1 for word in words])


def bounded(values: Tensor, source: torch.dtype, size: int) -> Tensor:
    """Saturate finite values at the largest magnitude of which `size` can be summed without overflow: `limited` with fewer operations."""
    if source == torch.float16:
        return values
    largest = torch.finfo(values.dtype).max / size
    return torch.where(values.isinf(), values, values.clamp(-largest, largest))


@lru_cache(maxsize=256)
def signs_of(turn: Turn) -> tuple[int, ...]:
    """1 or -1 for each element of a block."""
    if turn.signs < 0:
        return (1,) * turn.size
    flipped = (bit for number in range(-(-turn.size // 4)) for bit in definition.flips(number, turn.signs))  # type: ignore[no-untyped-call]
    return tuple(1 - 2 * bit for bit in islice(flipped, turn.size))


# Cached, because a copy to a device waits for it.
@lru_cache(maxsize=64)
def signs_on(device: torch.device, dtype: torch.dtype, turn: Turn) -> Tensor:
    """The signs of a block on a device, as a column."""
    return torch.tensor(signs_of(turn), dtype=dtype, device=device)[:, None]


def pieces(turn: Turn) -> Iterator[tuple[int, int, int]]:
    """Begin, end and block size of runs of equal blocks: the whole blocks, then the rest in powers of two, the largest first."""
    start = turn.length // turn.size * turn.size
    if start:
        yield 0, start, turn.size
    size = turn.size // 2
    while size:
        if turn.length & size:
            yield start, start + size, size
            start += size
        size //= 2


def _transformed(blocks: Tensor) -> Tensor:
    """Multiply blocks along the second-to-last dimension by Sylvester's matrix, orthonormally."""
    size, step = blocks.shape[-2], 1
    while step < size:
        pairs = blocks.unflatten(-2, (-1, 2, step)).unbind(-3)
        blocks = torch.stack(meaning.butterfly(*pairs), -3).flatten(-4, -2)
        step *= 2
    # Filled on the device: copying a number from the host would wait for the GPU.
    return blocks * blocks.new_full((), size**-0.5)
