"""Graphs that a compiler makes of functions called in the mode: their products were rounded when they were traced."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch

from qsim import private
from qsim.nn.calls.running import paused


def run_outside_the_mode() -> None:
    """While Dynamo traces a function: let its graph run without the mode. Else do nothing.

    A model can run in Python in the mode, and call a function that is compiled. The mode would see each operator of its graph again.
    """
    if torch.compiler.is_dynamo_compiling():
        if private.comptime is None or private.translator_of is None:  # which import all of the compiler
            _leave_graph()
        else:
            private.comptime(_pause_graphs)


@private.disable_dynamo  # type: ignore[untyped-decorator]
def _leave_graph() -> None:
    """End the graph that is traced, where it cannot be changed."""


def _pause_graphs(context: Any) -> None:
    output = private.translator_of(context).output
    if not isinstance(output.compiler_fn, _Paused):
        output.compiler_fn = _Paused(output.compiler_fn)


class _Paused:
    """A backend whose graphs leave the mode while they run."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.__name__ = getattr(backend, "__name__", type(backend).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile a graph."""
        compiled = self.backend(*args, **kwargs)
        return wraps(compiled)(partial(paused, compiled))
