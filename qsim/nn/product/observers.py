"""The observer hook of layers, which `qsim.diagnostics.Monitor` and `qsim.coverage` use.

Usually there is no observer: then each product asks once and finds `None`. Compiled code does not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qsim_kernels.ops.direct import DISPATCHED, Operators

if TYPE_CHECKING:
    from qsim.nn.product.sites import Site


class Observer:
    """Observes the points of one layer. Code that rounds reports its input, before or after it has used it; here nothing is kept of it.

    Nothing that an observer does may draw random numbers, change what it sees, or wait for the device.
    """

    def measured(self, site: Site, x: Tensor, seed: Tensor | None) -> Any:
        """Record a tensor that is rounded without scales, at a point that may be used later."""

    def used(self, name: str, measured: Any) -> None:
        """Called when a recorded tensor is used at a point."""

    def rounds(self, site: Site, x: Tensor, seed: Tensor | None, rounded: Tensor | None = None) -> None:
        """Called when a tensor is rounded at a point, and used; with the result if a callable rounded, which may not repeat itself."""

    def multiplies(self, *products: tuple[Site, Site]) -> None:
        """Called before a product, or two that one operator computes, with the sites that the operands of each have passed.

        The next operator that multiplies is theirs.
        """


#: Finds the observer of products outside of layers, by the module that has the parameter and its name, if anything watches them.
Finder = Callable[[nn.Module, str], Observer | None]

_current: Observer | None = None
_is_held = False
_finder: Finder | None = None


def current(ops: Operators = DISPATCHED) -> Observer | None:
    """The observer of a layer that runs with some operators."""
    return None if ops is DISPATCHED and torch.compiler.is_compiling() else _current


def exchange(observer: Observer | None) -> Observer | None:
    """Set the observer, or none; return the previous one. While an observer is held, it stays."""
    global _current
    before = _current
    if not _is_held:
        _current = observer
    return before


def watch_calls(finder: Finder | None) -> Finder | None:
    """Set the function that finds the observers of products outside of layers, or none; return the previous one."""
    global _finder
    before, _finder = _finder, finder
    return before


def enter_call(module: nn.Module, name: str) -> None:
    """Called before a product outside of layers, with the module that has the parameter; no name means two activations."""
    if _finder is not None and not torch.compiler.is_compiling():
        exchange(_finder(module, name))


def leave_call() -> None:
    """Called after a product outside of layers."""
    if _finder is not None and not torch.compiler.is_compiling():
        exchange(None)


@contextmanager
def hold(observer: Observer) -> Iterator[None]:
    """Let one observer see every product, and no other observer any, such as that of a monitor that samples the current step."""
    global _current, _is_held
    before = _current, _is_held
    _current, _is_held = observer, True
    try:
        yield
    finally:
        _current, _is_held = before
