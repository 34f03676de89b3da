"""Products as functions that graphs call: a compiler traces the operators that they consist of, and none of the code that chooses these.

Dynamo would interpret every line of a product, forward and backward, and check in each call all that it has read: seconds for each layer of
a model, and as long in each step as several kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qsim.nn.product.autocast import without_autocast
from qsim.nn.product.autograd import FivePointProduct
from qsim.nn.product.plans import ProductPlan
from qsim.nn.product.sites import Site
from qsim.private import compiling, is_compiling_flag


def with_function(plan: ProductPlan) -> ProductPlan:
    """A plan with the function that graphs call, if its roundings depend on nothing but its operands and seeds."""
    if is_compiling_flag is None or plan.points.wraps or plan.split is not None or not all(map(_is_pure, plan.sites)):
        return plan

    def product(a: Tensor, w: Tensor, bias: Tensor | None, seed: Tensor | None, weight_seed: Tensor | None) -> Tensor:
        with without_autocast(w.device):
            return _InGraph.apply(a, w, bias, seed, weight_seed, None, None, None, plan, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]

    return replace(plan, in_graph=torch.compiler.allow_in_graph(product))


def _is_pure(site: Site) -> bool:
    """Whether a site calls no code of others, and keeps no history."""
    return site.call is None and (site.quantizer is None or site.quantizer.scale is None or not site.quantizer.scale.is_recorded)


class _InGraph(FivePointProduct):
    """`FivePointProduct` while its operators are traced."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        with compiling():
            return FivePointProduct.forward(*args)

    @staticmethod
    def backward(*args: Any) -> tuple[Tensor | None, ...]:
        with compiling():
            return FivePointProduct.backward(*args)
