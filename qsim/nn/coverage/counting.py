"""Multiply-adds of operators as they run, by torch's formulas for its FLOP counter and those of the registry, and what they multiply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from qsim.nn.coverage.formulas import added
from qsim.nn.registry import FORMULAS
from qsim_kernels.ops.accumulate import multiplied_by
from qsim_kernels.private import tree_leaves


def multiply_adds(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int | None:
    """The multiply-adds of one call of an operator; `None` if it is not known to multiply."""
    name = _out_of_place(operator)
    if name in FORMULAS:
        return FORMULAS[name](*args)
    formula = flop_counter.flop_registry.get(torch.ops.aten.convolution if name == "qsim::float32_convolution" else operator)
    return None if formula is None else formula(*args, **kwargs, out_val=result) // 2


def operands(operator: Any, args: Sequence[Any]) -> list[Tensor]:
    """The tensors that an operator multiplies, without biases and results that it takes, too."""
    name = _out_of_place(operator)
    if name == "aten::convolution_backward":
        needs_input, needs_weight = args[10][:2]
        chosen = [args[0], *([args[1]] if needs_weight else []), *([args[2]] if needs_input else [])]
    elif FORMULAS.get(name) is added:
        chosen = list(args[1:3])
    elif "attention" in name:
        chosen = list(args[: 4 if "backward" in name else 3])
    else:
        chosen = list(args[: 3 if name == "aten::_trilinear" else 2])
    return [x for x in tree_leaves(chosen) if isinstance(x, Tensor)]


def products_of(operator: Any, args: Sequence[Any], count: int) -> list[list[Tensor]]:
    """The tensors that an operator multiplies, for each of its products: one, or the two gradients of a convolution."""
    multiplied = operands(operator, args)
    if count == 1:
        return [multiplied]
    g, a, w = multiplied
    return [[g, w], [g, a]]


def multiplier(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Who computed a product with an accumulator, the chip or its emulator; empty for others."""
    return multiplied_by(*args, **kwargs) if _name(operator) == "qsim::accumulate" else ""


def _name(operator: Any) -> str:
    return str(operator).replace(".", "::", 1)


def _out_of_place(operator: Any) -> str:
    """The name of an operator, or of the one that it applies in place."""
    return _name(operator).removesuffix("_")
