"""Results of autograd functions that may be changed in place, as those of torch's layers: torch refuses it for views."""

from __future__ import annotations

import torch
from torch import Tensor


def not_a_view(x: Tensor) -> Tensor:
    """A result in memory of its own, without the view that it is of: what an autograd function returns."""
    if torch.compiler.is_compiling() or not x._is_view():
        return x
    return torch.ops.aten._unsafe_view.default(x, x.shape)  # type: ignore[no-any-return]


def changeable(x: Tensor) -> Tensor:
    """The same in compiled code, for what an autograd function has returned."""
    return torch.ops.aten._unsafe_view.default(x, x.shape) if torch.compiler.is_compiling() else x
