"""Backward passes that cannot be differentiated again, and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

Gradients = TypeVar("Gradients")


def once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Refuses a backward pass that autograd would record.

    torch's `once_differentiable` refuses it only if the upstream gradient has a history. Behind a mere sum it has none; then what comes
    back would be a constant, and a gradient penalty on it would silently teach nothing. What `torch.func` transforms is always recorded;
    there torch's rule must do.
    """
    recorded_only_with_history = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Gradients:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
            raise RuntimeError("what rounds at points cannot be differentiated twice: leave create_graph=True out, or revert the layers")
        return recorded_only_with_history(ctx, *gradients)

    return refusing
