"""Keeping autocast from casting operands to 16 bits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on; torch cannot answer this for tensors without data."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Keep operands in their carrier: autocast would cast them to 16 bits."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()
