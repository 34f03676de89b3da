"""Sums of the rows of a matrix that have the same index; see `qsim_kernels.numbers.sums`.

Sums of equal length are a batch of products with ones for the operator `qsim::accumulate`, so that each device adds them as fast as it can.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.numbers.sums import noise_indices, read_sum


def accumulate_rows_into(out: Tensor, x: Tensor, index: Tensor, seed: Tensor | None, how: str, stream: int, offset: int) -> None:
    """Sum rows, in the order in which they come.

    Args:
        out: The result, of zeros.
        x: The matrix.
        index: The row of the result to which each row is added; rows with negative ones are not added.
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        how: The sum, spelled.
        stream: Which of the seed's streams of random bits to use.
        offset: Logical index of the first random number.
    """
    ordered, order = index.sort(stable=True)
    order = order[ordered >= 0]
    lengths = torch.bincount(index[index >= 0], minlength=len(out))
    starts = lengths.cumsum(0) - lengths
    described = read_sum(how)
    for length in filter(None, lengths.unique().tolist()):
        rows = (lengths == length).nonzero().view(-1)
        places = order[starts[rows, None] + torch.arange(length, device=x.device)]
        ones = x.new_ones((len(rows), 1, length))
        sums = torch.ops.qsim.accumulate.default(ones, x[places], seed, how, stream, offset, out.dtype, "never")
        out[rows] = sums.squeeze(1)
        offset += sums.numel() * noise_indices(described, length)
