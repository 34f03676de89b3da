"""Checksums of small tensors as sums of elementwise arithmetic, which compilers fuse with whatever reads the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.lowered import inductor, sizes
from qsim_kernels.lowered.fusible import fusible
from qsim_kernels.torch.reductions import summands


def checksum(x: Tensor, start: int, offset: int, row: int, stride: int) -> Tensor | None:
    """The checksum of a small tensor whose indices in the whole are consecutive; `None` for others."""
    if row or not sizes.is_small(x) or not inductor.generates(x.device):
        return None
    where = torch.arange(offset, offset + x.numel(), device=x.device).view(x.shape)
    return _summands(x, where, torch.int64).sum() + start


@fusible("checksum_fused(Tensor x, Tensor where, ScalarType dtype) -> Tensor", held=False)
def _summands(x: Tensor, where: Tensor, dtype: torch.dtype) -> Tensor:
    return summands(x, where)
