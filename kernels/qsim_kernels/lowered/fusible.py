"""Operators of one node in graphs that Inductor fuses with their neighbours: each computes every element by itself.

An operator is a function of broadcast tensors in plain torch. Inductor calls the same function with elements to write its loops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsim_kernels.lowered.elements import Element
from qsim_kernels.ops.backend import library

_OPERATORS: dict[Any, Callable[..., Any]] = {}


def fusible(schema: str, function: Callable[..., Tensor]) -> Any:
    """Define an operator by a function; its first argument has the result's shape, and its last is the result's dtype."""
    name = schema.partition("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qsim::{name}", lambda x, *given: torch.empty_like(x, dtype=given[-1]), lib=library)
    operator = getattr(torch.ops.qsim, name)
    _OPERATORS[operator] = function
    return operator.default


def known_to_compilers() -> None:
    """Let AOTAutograd recompute the operators in the backward pass, and Inductor generate their loops if it is the compiler."""
    from torch._functorch.partitioners import pointwise_ops  # imported while AOTAutograd traces

    cheap = pointwise_ops()
    cheap.extend(operator for operator in _OPERATORS if operator not in cheap)
    inductor: Any = sys.modules.get("torch._inductor.lowering")
    for operator, function in _OPERATORS.items() if inductor else ():
        if operator.default not in inductor.lowerings:
            inductor.register_lowering(operator, type_promotion_kind=None)(_loops(function))


def _loops(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that lowers an operator to Inductor's loops."""

    def lowered(*arguments: Any) -> Any:
        from torch._inductor import ir, lowering
        from torch.utils import _pytree as pytree

        size = arguments[0].get_size()
        given, spec = pytree.tree_flatten(arguments)
        boxes = [lowering.expand(x, size) if isinstance(x, ir.TensorBox) else x for x in given]
        loaders = [x.make_loader() if isinstance(x, ir.TensorBox) else None for x in boxes]

        def element(index: Any) -> Any:
            values = [x if load is None else Element(load(index), x.get_dtype()) for x, load in zip(boxes, loaders, strict=True)]
            return function(*pytree.tree_unflatten(values, spec)).value

        found = ir.Pointwise.create(device=arguments[0].get_device(), dtype=arguments[-1], inner_fn=element, ranges=list(size))
        # Each view of a result that is not in memory would compute it again.
        found.realize()
        return found

    return lowered
