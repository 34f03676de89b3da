"""The observer hook of layers, which `qsim.diagnostics.Monitor` uses.

Usually there is no observer: then each product asks once and finds `None`. Compiled code does not ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qsim.nn.product.sites import Site


class Observer(Protocol):
    """Observes the points of one layer. Code that rounds reports its input, before or after it has used it.

    Nothing that an observer does may draw random numbers, change what it sees, or wait for the device.
    """

    def measured(self, site: Site, x: Tensor, seed: Tensor | None) -> Any:
        """Record a tensor that is rounded without scales, at a point that may be used later."""

    def used(self, name: str, measured: Any) -> None:
        """Called when a recorded tensor is used at a point."""

    def rounds(self, site: Site, x: Tensor, seed: Tensor | None) -> None:
        """Called when a tensor is rounded at a point, and used."""


_current: Observer | None = None


def current() -> Observer | None:
    """The observer of the running layer."""
    return None if torch.compiler.is_compiling() else _current


def exchange(observer: Observer | None) -> Observer | None:
    """Set the observer, or none; return the previous one."""
    global _current
    before, _current = _current, observer
    return before
