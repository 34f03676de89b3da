"""The operator that sums rows with the same index, as the gradient of a lookup does: schema, fake, one implementation for every device.

Sums of equal length are a batch of products with ones for the operator `qsim::accumulate`, so that each device adds them as fast as it can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim_kernels.numbers.sums import noise_indices, read_sum
from qsim_kernels.ops.backend import library, schema_of


def accumulate_rows(
    x: Tensor, index: Tensor, rows: int, seed: Tensor | None, how: str, stream: int, offset: int, dtype: torch.dtype
) -> Tensor:
    """Sums of the rows of a matrix that have the same index; see `qsim_kernels.numbers.sums`.

    Args:
        x: Of shape [n, columns].
        index: The row of the result to which each row is added, of shape [n]; rows with negative ones are not added.
        rows: Rows of the result.
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        how: The sum, spelled.
        stream: Which of the seed's streams of random bits to use.
        offset: Logical index of the first random number.
        dtype: The dtype to which results are rounded to nearest.
    """
    if x.dim() != 2 or index.shape != x.shape[:1]:
        raise ValueError(f"accumulate_rows: x must be a matrix with a row for each index, got {tuple(x.shape)} and {tuple(index.shape)}")
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("accumulate_rows: sums depend on how often an index occurs, which cannot be read while a CUDA graph is captured")
    out = x.new_zeros((rows, x.shape[1]), dtype=dtype)
    described = read_sum(how)
    ordered, order = index.sort(stable=True)
    order = order[ordered >= 0]
    lengths = torch.bincount(index[index >= 0], minlength=len(out))
    starts = lengths.cumsum(0) - lengths
    for length in filter(None, lengths.unique().tolist()):
        targets = (lengths == length).nonzero().view(-1)
        places = order[starts[targets, None] + torch.arange(length, device=x.device)]
        ones = x.new_ones((len(targets), 1, length))
        sums = torch.ops.qsim.accumulate.default(ones, x[places], seed, how, stream, offset, out.dtype, "never")
        out[targets] = sums.squeeze(1)
        offset += sums.numel() * noise_indices(described, length)
    return out


def _fake(x: Tensor, index: Tensor, rows: int, *rest: Any) -> Tensor:
    return x.new_empty((rows, x.shape[1]), dtype=rest[-1])


library.define(schema_of(accumulate_rows), tags=(torch.Tag.pt2_compliant_tag,))
library.impl("accumulate_rows", accumulate_rows, "CompositeExplicitAutograd")
torch.library.register_fake("qsim::accumulate_rows", _fake, lib=library)
