"""A sum over a tensor's elements that changes with each of them: an element's bits are mixed with its index before they are added.

It does not depend on the memory layout or on the order of the additions, and the checksums of a tensor's shares add up to that of the
whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.meanings.torch import mixing
from qsim_kernels.torch.chunks import pieces

#: Integers of the size of an element.
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(x: Tensor, start: int, offset: int = 0, row: int = 0, stride: int = 0) -> Tensor:
    """Add the mixed bits of all elements to a number, modulo 2**64.

    Args:
        x: The elements.
        start: The number.
        offset: The index of the first element in the whole tensor.
        row: The number of elements with consecutive indices; 0 if all have.
        stride: The distance from the index of one row's first element to that of the next.

    Returns:
        A 0-d int64 tensor on the device of `x`.
    """
    total, words = torch.full((), start, dtype=torch.int64, device=x.device), x.view(WORDS[x.element_size()])
    for first, (piece,) in pieces(words):
        index = torch.arange(first, first + piece.numel(), device=words.device)
        if row:
            index = index // row * stride + index % row
        word = piece.reshape(-1).to(torch.int64)
        if words.dtype == torch.int64:
            word = mixing.folded(word)
        total += mixing.mixed(word, index.add_(offset)).sum()
    return total
