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


def in_memory_order(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Permute dimensions into the order in which elements lie in memory, as channels-last images do, if they lie alike in all tensors.

    Loops that draw nothing may take elements in any order, and so need no copies.
    """
    strides = tensors[0].stride()
    if all(x.is_contiguous() for x in tensors) or any(x.stride() != strides for x in tensors):
        return tensors
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    permuted = tuple(x.permute(order) for x in tensors)
    return permuted if permuted[0].is_contiguous() else tensors


def held(x: Tensor) -> StoredValues:
    """The values of such a tensor."""
    return StoredValues(x.data_ptr(), x.element_size() == 2)


def loop_noise(noise: Noise) -> NoiseNumbers:
    """The source of random bits as loops take it."""
    seed, stream, offset = noise
    return NoiseNumbers(0 if seed is None else int(seed), stream, offset)
