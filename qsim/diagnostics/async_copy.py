"""Asynchronous copies of tensors from a device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """An asynchronous copy of a tensor to the host; nothing blocks until it is read.

    Args:
        x: The tensor; it may change afterwards.
    """

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not x.is_cuda:
            self._host = x.to("cpu", copy=True)
            return
        self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        with torch.cuda.device(x.device):
            self._host.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_here(self) -> bool:
        """Whether it can be read without blocking."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """The copy; blocks until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def is_capturing() -> bool:
    """Whether the host is currently capturing a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
