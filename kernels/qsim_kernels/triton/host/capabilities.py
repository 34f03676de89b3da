"""The abilities of the GPUs here, from NVIDIA's compute capabilities. Other vendors count their own, which mean nothing here."""

from __future__ import annotations

from functools import lru_cache

import torch

from qsim_kernels.meanings.triton import INTERPRETED


def compute_capability(device: torch.device | int) -> tuple[int, int]:
    """NVIDIA's compute capability of a GPU; (0, 0) for those of others."""
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)


@lru_cache(maxsize=1)
def supports_packed_16_bit() -> bool:
    """Whether every GPU adds and compares 16-bit pairs and has bfloat16 pairs: a prepared launch serves all of them."""
    return not INTERPRETED and all(compute_capability(i) >= (9, 0) for i in range(torch.cuda.device_count()))
