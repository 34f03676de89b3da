"""Sizes of the difference between two tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative(error: Tensor, base: Tensor) -> float:
    """The norm of an error relative to that of a tensor; infinite if the error is not finite, or the tensor is zero.

    Example:
        >>> relative(torch.tensor([0.3, 0.4]), torch.tensor([3.0, 4.0]))
        0.1
    """
    size = float(error.norm())
    if size == 0:
        return 0.0
    norm = float(base.double().norm())
    return size / norm if math.isfinite(size) and norm > 0 else math.inf


def error(a: Tensor, b: Tensor) -> Tensor:
    """`b - a` in float64; 0 where both are NaN or the same infinity."""
    first, second = a.double(), b.double().to(a.device)
    same = (first == second) | (first.isnan() & second.isnan())
    return torch.where(same, 0.0, second - first)


def ulps(a: Tensor, b: Tensor) -> float:
    """The largest error in units in the last place of `a`, in the coarser of the two dtypes.

    Example:
        >>> ulps(torch.tensor([1.0, 2.0]), torch.tensor([1.0 + 2**-22, 2.0]))
        2.0
    """
    if not a.numel():
        return 0.0
    coarse = max((a.dtype, b.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    info = torch.finfo(coarse)
    size = a.double().abs().clamp(min=info.tiny)
    unit = torch.where(size.isfinite(), torch.exp2(torch.floor(torch.log2(size))) * info.eps, 1.0)
    return float((error(a, b).abs() / unit).max().nan_to_num(math.inf, math.inf))
