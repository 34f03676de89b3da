"""Operators that compute every element by itself, which compilers fuse with their neighbours.

Each is a function in plain torch. In a graph that Inductor compiles, a call is a single node, and the same function writes Inductor's
loops: the fewer nodes a graph has, the sooner it is compiled. Other graphs hold the torch operators that the function calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from qsim_kernels.lowered import inductor
from qsim_kernels.ops.backend import library


def fusible(schema: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Define an operator by the function that computes it.

    Args:
        schema: The operator's schema. Its first argument has the result's shape, with which the other tensors broadcast, and its last is
            the result's dtype.
    """
    name = schema.partition("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    torch.library.register_fake(f"qsim::{name}", lambda x, *given: torch.empty_like(x, dtype=given[-1]), lib=library)
    operator = getattr(torch.ops.qsim, name)

    def define(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        library.impl(name, function, "CompositeExplicitAutograd")

        @wraps(function)
        def called(x: Tensor, *arguments: object) -> Tensor:
            if not inductor.generates(x.device):
                return function(x, *arguments)
            inductor.learn(operator, function)
            return operator.default(x, *arguments)  # type: ignore[no-any-return]

        return called

    return define
