"""Errors for backward passes that cannot be differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

Gradients = TypeVar("Gradients")


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
        if not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
            raise RuntimeError("rounding at points cannot be differentiated twice: omit create_graph=True, or revert the layers")
        return recorded_only_with_history(ctx, *gradients)

    return refusing
