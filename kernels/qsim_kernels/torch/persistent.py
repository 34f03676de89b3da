"""Small tensors that stay in a device's memory for as long as the process runs: tables, whose addresses launches keep, and constants.

Callers keep them in dictionaries, by `setdefault`: where two threads ask first, both get the tensor that stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor


def persistent(numbers: Sequence[int] | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers. They have been written when this returns, so that every stream may read them.

    While torch.compile warms up a CUDA graph, the calling thread takes memory from a pool in which nothing may outlive the call. Another
    thread does not.

    Args:
        numbers: The numbers, or one for a tensor without dimensions.
        dtype: Their dtype.
        device: Where they stay, with its index.
    """
    make = partial(torch.tensor, numbers, dtype=dtype, device=device)
    if device.type != "cuda":
        return make()
    with ThreadPoolExecutor(1) as other:
        return other.submit(make).result()
