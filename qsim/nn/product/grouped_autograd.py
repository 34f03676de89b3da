"""The autograd function of grouped products: that of other products, with a plan that has the groups of each pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from qsim.functional.applying import applied, changeable
from qsim.nn.product import observers
from qsim.nn.product.autocast import without_autocast
from qsim.nn.product.autograd import drawn_seeds, gradients, multiplied
from qsim.nn.product.double_backward import refuses_double_backward
from qsim.nn.product.grouped import GroupedProduct
from qsim.nn.product.grouped_rounding import GroupedSite
from qsim.nn.product.groups import Groups
from qsim.nn.product.operands import Operand
from qsim.nn.product.plans import ProductPlan
from qsim.random.sources import Stream


def grouped_product(a: Tensor, w: Tensor, ends: Tensor, plan: ProductPlan, stream: Stream = 0) -> Tensor:
    """A product of rows in groups with a matrix for each group.

    Args:
        a: An input.
        w: A stack of weights.
        ends: The ends of the groups.
        plan: The plan of a `GroupedProduct`.
        stream: Distinguishes weights that have the same values.
    """
    return grouped_with_seeds(a, w, ends, *drawn_seeds(a, w, plan, stream), plan)


def grouped_with_seeds(a: Tensor, w: Tensor, ends: Tensor, seed: Tensor | None, weight_seed: Tensor | None, plan: ProductPlan) -> Tensor:
    """`grouped_product` with given seeds; torch's function modes see it as one function of its operands."""
    if has_torch_function((a, w)):
        return handle_torch_function(grouped_with_seeds, (a, w), a, w, ends, seed, weight_seed, plan)
    with without_autocast(a.device):
        return changeable(applied(_GroupedFivePointProduct, plan.ops)(a, w, ends, seed, weight_seed, plan, torch.is_grad_enabled()))


class _GroupedFivePointProduct(torch.autograd.Function):
    """The product with its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, w: Tensor, ends: Tensor, seed: Tensor | None, weight_seed: Tensor | None, plan: ProductPlan, recording: bool
    ) -> Tensor:
        ctx.plan = plan
        result, saved = multiplied(ctx, _in_groups(plan, ends), a, w, None, seed, weight_seed, recording)
        ctx.save_for_backward(ends, *saved)
        return result

    @staticmethod
    @refuses_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        ends, *saved = ctx.saved_tensors
        with without_autocast(g.device):
            of_a, of_w, _ = gradients(ctx, _in_groups(ctx.plan, ends), saved, g)
        return of_a, of_w, None, None, None, None, None


def _in_groups(plan: ProductPlan, ends: Tensor) -> ProductPlan:
    """The plan in one pass, whose rows fall into groups: only scales, transforms and observers need to know which."""
    groups, gradient, product = Groups(ends), plan.gradient, plan.setting.product
    assert isinstance(product, GroupedProduct)
    is_observed = observers.current(plan.ops) is not None
    own = plan.setting._replace(product=replace(product, ends=ends))
    if not is_observed and all(site.is_plain for site in plan.sites):
        return replace(plan, setting=own)

    def bound(operand: Operand) -> Operand:
        return replace(operand, forward=GroupedSite.of(operand.forward, groups), backward=GroupedSite.of(operand.backward, groups))

    for_first, for_second = GroupedSite.of(gradient.for_first, groups), GroupedSite.of(gradient.for_second, groups)
    gradient = replace(gradient, for_first=for_first, for_second=for_second)
    return replace(plan, setting=own, first=bound(plan.first), second=bound(plan.second), gradient=gradient)
