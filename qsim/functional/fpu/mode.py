"""The dispatch mode that rounds: what torch calls for each operator, also in the threads of a backward pass."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qsim.functional.fpu.operators import makes_none, rounded_of
from qsim.functional.fpu.output import Output
from qsim.private import dispatch_modes, schema_of


class _Thread(threading.local):
    """Whether the thread is within an operator that a mode already handles, which the modes around it leave alone."""

    taken = False


_thread = _Thread()


class RoundingMode(TorchDispatchMode):
    """Round the outputs of operators. Of nested modes, only the innermost does.

    torch passes the modes of the thread that calls `backward` to the threads that do the work, so that it rounds there as well.

    Args:
        output: The rounding of outputs; `None` leaves everything in full precision.
    """

    def __init__(self, output: Output | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.output = output

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator and round its output."""
        kwargs = kwargs or {}
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # subclasses eventually compute with plain tensors, which arrive here
        rounded = rounded_of(func)
        if self.output is None or rounded is None or _thread.taken or makes_none(func, args):
            return _taken(func, args, kwargs)
        written = rounded.tensors_written(args, kwargs)
        for x in written:
            self.output.leaves(x)  # raises errors before anything is written
        result = _taken(func, args, kwargs)
        for x in written:
            self.output.into(x)
        if not rounded.results:
            return result
        if len(schema_of(func).returns) == 1:
            return self._of(result)
        return type(result)(self._of(x) if i in rounded.results else x for i, x in enumerate(result))

    def _of(self, result: Any) -> Any:
        assert self.output is not None
        return [self.output.of(x) for x in result] if isinstance(result, (list, tuple)) else self.output.of(result)


def _taken(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before, _thread.taken = _thread.taken, True
    try:
        return func(*args, **kwargs)
    finally:
        _thread.taken = before


#: A context in which nothing is rounded.
FULL_PRECISION = RoundingMode(None)


def innermost() -> RoundingMode | None:
    """The mode that rounds the current call."""
    found = [mode for mode in dispatch_modes() if isinstance(mode, RoundingMode)]
    return found[-1] if found else None
