"""Applying autograd functions: without what torch's `apply` needs time for, and with results that may be changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from qsim_kernels.ops.direct import DISPATCHED, Operators


def applied(function: type[Function], ops: Operators) -> Callable[..., Any]:
    """The `apply` of an autograd function, given the operators for its arguments.

    Torch's own looks for tensors left over by torch.func, which direct operators rule out, and reads the signature of `forward` in every
    call, which takes longer than rounding a small tensor.
    """
    return function.apply if ops is DISPATCHED else super(Function, function).apply  # type: ignore[misc]


def not_a_view(x: Tensor) -> Tensor:
    """Return a result that owns its memory as a tensor that is not a view: torch forbids changing views that autograd functions return."""
    if torch.compiler.is_compiling() or not x._is_view():
        return x
    return torch.ops.aten._unsafe_view.default(x, x.shape)  # type: ignore[no-any-return]


def changeable(x: Tensor) -> Tensor:
    """Return a result of an autograd function as a tensor that compiled code may change in place; see `not_a_view`."""
    return torch.ops.aten._unsafe_view.default(x, x.shape) if torch.compiler.is_compiling() else x
