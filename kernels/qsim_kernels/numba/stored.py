"""Tensors as the loops read and write them: contiguous float32 or bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.numba.jobs import StoredValues
from qsim_kernels.numbers.grid import Noise, NoiseNumbers

STORED = (torch.float32, torch.bfloat16)


def readable(x: Tensor) -> Tensor:
    """A tensor that loops read, or a copy of it."""
    return (x if x.dtype in STORED else x.to(torch.float32)).contiguous()


def writable(out: Tensor) -> Tensor:
    """A tensor that loops write, or another one in its place."""
    return out if out.dtype in STORED and out.is_contiguous() else torch.empty(out.shape, dtype=torch.float32, device=out.device)


def held(x: Tensor) -> StoredValues:
    """The values of such a tensor."""
    return StoredValues(x.data_ptr(), x.element_size() == 2)


def loop_noise(noise: Noise) -> NoiseNumbers:
    """The source of random bits as loops take it."""
    seed, stream, offset = noise
    return NoiseNumbers(0 if seed is None else int(seed), stream, offset)
