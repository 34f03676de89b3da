"""The sum of a tensor's bits, element by element: it does not depend on where in memory they lie, nor in which order."""

from __future__ import annotations

from torch import Tensor

from qsim_kernels.reference.chunks import pieces


def add_words(total: Tensor, words: Tensor) -> None:
    """Adds all of `words` to `total`, modulo 2**64.

    Args:
        total: A 0-d int64 tensor.
        words: Integers.
    """
    # In pieces, because torch first makes eight bytes of every element.
    for _, (piece,) in pieces(words):
        total += piece.sum(dtype=total.dtype)
