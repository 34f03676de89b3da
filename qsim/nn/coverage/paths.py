"""The module that a program is in: forward by hooks, backward by the number that autograd gives to each operation it records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from qsim.nn.histories import modules_in
from qsim.nn.record import known
from qsim.private import backward_pass, node_number, running_node as node_in_backward, sequence_number


class Paths:
    """The path of the running module.

    Attributes:
        called: The modules that were called.
        names: The name of each module, without those that are parts of points.
    """

    def __init__(self, model: nn.Module) -> None:
        self.called: set[nn.Module] = set()
        # Points compute their layer's products.
        points = [rounding.points for module in model.modules() for rounding in (known(module).layer, known(module).calls) if rounding]
        parts = {part for each in points for point in modules_in(each).values() for part in point.modules()}
        self.names = {module: name for name, module in model.named_modules() if module not in parts}
        # Modules that are running, each with the backward pass that called it, as activation checkpointing does.
        self._running: list[tuple[nn.Module, int]] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the calls of modules."""
        handles = register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        self.called.add(module)
        if module in self.names:
            self._running.append((module, backward_pass()))

    def _leave(self, module: nn.Module, args: object, result: object) -> None:
        if self._running and self._running[-1][0] is module:
            self._running.pop()

    @property
    def current(self) -> str:
        """The path of the innermost running module; empty for the model itself."""
        return self.names[self._running[-1][0]] if self._running else ""

    @property
    def is_backward(self) -> bool:
        """Whether autograd computes gradients, and not activations once more."""
        if backward_pass() == -1:
            return False
        return self._running[-1][1] != backward_pass() if self._running else not torch.is_grad_enabled()


def recorded_node() -> int:
    """The number of the operation that autograd has recorded last; while an operator runs this is its own, if it is recorded."""
    number: int = sequence_number() - 1
    return number


def running_node() -> int:
    """The number of the operation whose gradients are computed, or -1."""
    node = node_in_backward()
    return -1 if node is None else node_number(node)


def running_operation() -> str:
    """Autograd's name of the operation whose gradients are computed, such as `LinalgSolveTriangular`; empty in the forward pass."""
    node = node_in_backward()
    return "" if node is None else node.name().partition("Backward")[0]
