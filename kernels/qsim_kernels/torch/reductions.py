"""Reductions in plain torch: checksums, and tallies of rounding outcomes over a tensor's elements.

A checksum changes with each element: an element's bits are mixed with its index before they are added. It does not depend on the memory
layout or on the order of the additions, and the checksums of a tensor's shares add up to that of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.meanings.torch import mixing
from qsim_kernels.numbers import tallies
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


def tally(x: Tensor, rounded: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Count and sum rounding outcomes over a tensor's elements, on its device, without synchronizing.

    Args:
        x: The elements.
        rounded: The rounded elements, in any dtype.
        low: The smallest value of the grid.
        high: The largest value of the grid.

    Returns:
        Counts in int64 and sums in float64, as described in `qsim_kernels.numbers.tallies`.
    """
    counts, sums = x.new_zeros(tallies.SIZE, dtype=torch.int64), x.new_zeros(tallies.SUMS, dtype=torch.float64)
    for _, (before, after) in pieces(x, rounded):
        x64, rounded64 = before.reshape(-1).to(torch.float64), after.reshape(-1).to(torch.float64)
        counts[: tallies.FIELDS] += torch.bincount(_fields(before.reshape(-1)), minlength=tallies.FIELDS)
        beyond = (x64 > high) | (x64 < low)
        facts = {
            tallies.ZERO: x64 == 0,
            tallies.NAN: x64.isnan(),
            tallies.SATURATED: beyond,
            tallies.UNDERFLOWED: (rounded64 == 0) & (x64 != 0) & ~beyond,
            tallies.EXACT: (rounded64 == x64) & ~beyond,
        }
        for place, fact in facts.items():
            counts[place] += fact.sum()
        finite = x64.isfinite() & rounded64.isfinite()
        sums[tallies.SIGNAL] += torch.where(finite, x64, 0.0).square().sum()
        sums[tallies.NOISE] += torch.where(finite, rounded64 - x64, 0.0).square().sum()
    return counts, sums


def _fields(x: Tensor) -> Tensor:
    """The elements' exponent fields in float32."""
    if x.dtype != torch.float64:
        return (x.to(torch.float32).view(torch.int32) >> 23) & tallies.SPECIAL
    field = (x.view(torch.int64) >> 52) & 0x7FF
    within = (field - 1023 + tallies.BIAS).clamp(0, tallies.LARGEST)
    return torch.where(field == 0x7FF, tallies.SPECIAL, within)
