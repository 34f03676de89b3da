"""Autocast, which makes 16 bits of operands unless it is kept from it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on; for tensors without data torch does not even answer."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Leaves operands in their carrier: autocast would make 16 bits of them."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()
