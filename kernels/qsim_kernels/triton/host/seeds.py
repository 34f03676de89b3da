"""Seeds as arguments of kernels."""

from __future__ import annotations

from torch import Tensor


def seed_of(seed: Tensor | None, x: Tensor) -> tuple[Tensor | None, int]:
    """The seed by pointer if it is on the device, without synchronizing; otherwise by value."""
    if seed is None:
        return None, 0
    return (seed, 0) if seed.device == x.device else (None, int(seed))
