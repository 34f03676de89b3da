"""The running modules of a converted model, and the function mode that they run in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsim.nn.product import observers
from qsim.private import function_mode, without_function_mode


class CallTracer(Protocol):
    """Records the calls of functions of torch, as `qsim.diagnostics.trace` does.

    Attributes:
        is_inside: Whether it is within a call already, whose own calls are not recorded.
    """

    is_inside: bool

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]) -> Any:
        """Record a call of a function, which `compute(*args, **kwargs)` carries out, and return its result."""


class _Running(threading.local):
    """The state of a thread.

    Attributes:
        modules: The modules whose calls are rounded, the innermost last.
        is_rounding: Whether qsim computes a product, whose own calls of torch stay as they are.
        shapes: The shapes of the parameters of the outermost module, once a call in its run has asked for them.
        is_traced: Whether a compiler traces a module.
        derived: In compiled code, the tensors that were computed from parameters, each with its parameter.
        replacements: In compiled code, the tensors that replace parameters of the outermost module, once a call has asked for them.
        tracer: What records the calls of functions, if anything does. The mode asks it, because it gets them before the tracer's own mode.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.is_rounding = False
        self.shapes: set[torch.Size] | None = None
        self.is_traced = False
        self.derived: list[tuple[Tensor, Tensor]] | None = None
        self.replacements: list[Tensor] | None = None
        self.tracer: CallTracer | None = None


running = _Running()


#: Whether torch lets code leave a mode.
_CAN_LEAVE = function_mode is not None and without_function_mode is not None


class PausedInLayers(TorchFunctionMode):
    """Base class of modes that layers with points leave while they run: they round by themselves, and modes make every call slower."""


def paused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without the innermost function mode, if that is of this kind."""
    if torch.compiler.is_compiling() or not _CAN_LEAVE:  # compiled code cannot leave a mode, nor does one slow it down
        return without_inner_rounding(call, *args, **kwargs) if running.modules else call(*args, **kwargs)
    if not isinstance(function_mode(), PausedInLayers):
        return call(*args, **kwargs)
    with without_function_mode():
        return call(*args, **kwargs)


@contextmanager
def as_if_running(modules: list[nn.Module]) -> Iterator[None]:
    """Run code outside the mode, as if some modules were running: to repeat a call of the past, or one of another model."""
    is_inside = _CAN_LEAVE and isinstance(function_mode(), PausedInLayers)
    paused_mode = without_function_mode() if is_inside else nullcontext()
    before, running.modules, running.shapes = running.modules, modules, None
    try:
        with paused_mode:
            yield
    finally:
        running.modules, running.shapes = before, None


def without_inner_rounding(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of qsim, in which no further call is rounded."""
    before, running.is_rounding = running.is_rounding, True
    try:
        return call(*args, **kwargs)
    finally:
        running.is_rounding = before
        observers.leave_call()
