"""Modules whose calls are rounded: the same objects with another class, which runs `forward` in the function mode."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import Any

import torch
from torch import nn

from qsim.nn.calls.mode import ProductCallsMode
from qsim.nn.calls.running import as_if_running, running
from qsim.nn.histories import RemembersAmaxes

_mode = ProductCallsMode()


class RoundsCalls(RemembersAmaxes):
    """Base class of the classes that `with_calls` makes."""

    #: The class that they are made from.
    without_calls: type[nn.Module]

    def __init_subclass__(cls) -> None:
        """Keep the class out of its ancestors' lists of subclasses, which some of them have."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as the class that it was made from, which can be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _unpickled, (self.without_calls,), *reduced[2:]


_CLASSES: dict[type, Any] = {}


def with_calls(cls: type[nn.Module]) -> Any:
    """A class of modules, derived from another, in which the products of `forward` are rounded. It has the same name."""
    if cls not in _CLASSES:
        own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "without_calls": cls}
        make: Any = type(cls)
        _CLASSES[cls] = make(cls.__name__, (RoundsCalls, cls), {**own, "forward": in_the_mode(cls)})
    return _CLASSES[cls]


def in_the_mode(cls: type[nn.Module]) -> Callable[..., Any]:
    """The `forward` of a class of modules, run in the mode."""

    @wraps(cls.forward)
    def rounded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        return _in_steps(self, result) if isinstance(result, Generator) else result

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The module that a compiler begins with: blocks are compiled one by one, and the next one needs the same graph.
        is_first = torch.compiler.is_compiling() and not running.is_traced
        running.is_traced = running.is_traced or is_first
        running.modules.append(self)
        try:
            if len(running.modules) > 1:
                return cls.forward(self, *args, **kwargs)
            if not torch.compiler.is_compiling():
                running.shapes = None  # since the last run, parameters may have been resized
            with _mode:
                return cls.forward(self, *args, **kwargs)
        finally:
            running.modules.pop()
            if is_first:
                running.is_traced, running.derived, running.replacements = False, None, None

    return rounded


def _in_steps(module: nn.Module, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """The generator that a `forward` returned: its code runs in the mode, and that between its steps does not."""
    resume, sent = steps.send, None
    while True:
        try:
            with as_if_running([*running.modules, module]), _mode:
                item = resume(sent)
        except StopIteration as end:
            return end.value
        try:
            resume, sent = steps.send, (yield item)
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:  # thrown in by its caller
            resume, sent = steps.throw, error


def _unpickled(cls: type[nn.Module]) -> Any:
    made = with_calls(cls)
    return made.__new__(made)
