"""Autograd functions: applied without torch's slow `apply`, with results that may be changed in place, and differentiable only once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from qsim.private import owning_view
from qsim_kernels.ops.direct import DISPATCHED, Operators
from qsim_kernels.private import is_in_transform

Gradients = TypeVar("Gradients")


def applied(function: type[Function], ops: Operators) -> Callable[..., Any]:
    """The `apply` of an autograd function, given the operators for its arguments.

    Torch's own looks for tensors left over by torch.func, which direct operators rule out, and reads the signature of `forward` in every
    call, which takes longer than rounding a small tensor.
    """
    return function.apply if ops is DISPATCHED else super(Function, function).apply  # type: ignore[misc]


def not_a_view(x: Tensor) -> Tensor:
    """Return a result that owns its memory as a tensor that is not a view: torch forbids changing views that autograd functions return."""
    if torch.compiler.is_compiling() or x._base is None:
        return x
    return owning_view(x, x.shape)  # type: ignore[no-any-return]


def changeable(x: Tensor) -> Tensor:
    """Return a result of an autograd function as a tensor that compiled code may change in place; see `not_a_view`."""
    return owning_view(x, x.shape) if torch.compiler.is_compiling() else x


def refuses_double_backward(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Raise an error for a backward pass that autograd would record.

    torch's `once_differentiable` raises only if the upstream gradient has a history. After a plain sum it has none; then the result would
    be a constant, and a gradient penalty on it would silently have no effect. `torch.func` transforms always record; there torch's rule has
    to do.
    """
    recorded_only_with_history = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Gradients:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        if not torch.compiler.is_compiling() and not is_in_transform():
            raise RuntimeError("rounding at points cannot be differentiated twice: omit create_graph=True, or revert the layers")
        return recorded_only_with_history(ctx, *gradients)

    return refusing
