"""Recorded calls: clear errors for torch.jit and torch.fx.symbolic_trace, and whether a tensor has values yet.

Roundings depend on dtypes, shapes and seeds that are drawn at every call. torch.compile and torch.export handle these; torch.jit and
torch.fx.symbolic_trace fail somewhere inside torch, or freeze what should be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.fx import Proxy

from qsim.private import TransformType, transforms
from qsim_kernels.private import FakeTensor

Function = TypeVar("Function", bound=Callable[..., Any])

_INSTEAD = "use torch.compile or torch.export.export instead"
_REVERT = ", or take the points away with qsim.revert(model)"


def refuse_tracing(name: str, x: object, w: object = None, *, has_points: bool = False) -> None:
    """Raise an error if torch.jit.trace records this call, or torch.fx.symbolic_trace does.

    Args:
        name: What is called.
        x: Its input.
        w: Its second operand, if it has one.
        has_points: Whether it is a layer whose points can be taken away.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        raise RuntimeError(f"{name}: torch.jit.trace is not supported: {_INSTEAD}{_REVERT if has_points else ''}")
    if isinstance(x, Proxy) or isinstance(w, Proxy):
        instead = f"torch.export.export(model, inputs).module() gives a torch.fx graph{_REVERT if has_points else ''}"
        raise TypeError(f"{name}: an operand is a torch.fx.Proxy, but torch.fx.symbolic_trace is not supported: {instead}")


def refuse_scripting(name: str, *, has_points: bool = False) -> NoReturn:
    """Raise the error for torch.jit.script."""
    raise RuntimeError(f"{name}: torch.jit.script is not supported: {_INSTEAD}{_REVERT if has_points else ''}")


def not_scriptable(function: Function) -> Function:
    """Make torch.jit.script refuse a function with a clear error: torch calls this attribute before it reads the source."""

    def refuse() -> NoReturn:
        refuse_scripting(function.__name__)

    function.__prepare_scriptable__ = refuse  # type: ignore[attr-defined]
    return function


def is_readable(x: Tensor) -> bool:
    """Whether a tensor's values can be read now."""
    if torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor):
        return False
    if any(level.key() == TransformType.Vmap for level in transforms() or ()):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
