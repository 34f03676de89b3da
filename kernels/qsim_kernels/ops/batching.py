"""The vmap rule of operators whose results depend on more than each element: a call for each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def one_by_one(name: str) -> Callable[..., Any]:
    """A vmap rule: every sample gets the same results as in a call of its own."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        operator = getattr(torch.ops.qsim, name)
        # With no samples, run the operator on a fake one to get the shapes and dtypes of the results.
        sizes = range(info.batch_size) if info.batch_size else [None]
        results = [operator(*(_sample(a, dim, i) for a, dim in zip(arguments, in_dims, strict=True))) for i in sizes]
        if isinstance(results[0], Tensor):
            return torch.stack(results)[: info.batch_size], 0
        return tuple(torch.stack(part)[: info.batch_size] for part in zip(*results, strict=True)), (0,) * len(results[0])

    return rule


def _sample(argument: Any, dim: Any, index: int | None) -> Any:
    if not isinstance(argument, Tensor) or not isinstance(dim, int):
        return argument
    return argument.new_zeros(argument.movedim(dim, 0).shape[1:]) if index is None else argument.select(dim, index)
