"""Algorithms 1 and 2 of *Training with Fewer Bits*: a product whose operands and gradients are rounded at five points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from qsim.functional.results import changeable, not_a_view
from qsim.nn.product import observers
from qsim.nn.product.autocast import autocasts, without_autocast
from qsim.nn.product.double_backward import refuses_double_backward
from qsim.nn.product.operands import Upstream
from qsim.nn.product.plans import ProductPlan, ProductSetting, plan_of
from qsim.nn.product.sites import beyond
from qsim.random import seeds
from qsim_kernels.ops.direct import DISPATCHED, Operators, operators


def five_point_product(
    a: Tensor, w: Tensor, bias: Tensor | None, setting: ProductSetting, stream: int = 0, groups: Tensor | None = None
) -> Tensor:
    """A product whose operands are rounded forward and backward.

    Args:
        a: An input.
        w: A weight, or another input.
        bias: Added to the result, not rounded.
        setting: The points and the operation.
        stream: Distinguishes weights that have the same values.
        groups: The ends of the groups of rows, in products of groups.
    """
    return planned_product(a, w, bias, plan_of(setting, a, w), stream, groups)


def planned_product(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan, stream: int = 0, groups: Tensor | None = None) -> Tensor:
    """`five_point_product` with its plan."""
    points, ops = plan.setting.points, plan.ops
    seed = seeds.drawn(a.device, ops) if points.is_stochastic else None
    weight_draws = points.weight_is_stochastic and not plan.setting.two_inputs
    weight_seed = seeds.weight_seed(w, stream, ops=ops) if weight_draws else None
    if ops is DISPATCHED or torch.is_autocast_enabled(a.device.type):
        return product_with_seeds(a, w, bias, seed, weight_seed, plan, groups)
    return _apply(a, w, bias, seed, weight_seed, plan, torch.is_grad_enabled(), groups)  # type: ignore[no-any-return,no-untyped-call]


def product_with_seeds(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    weight_seed: Tensor | None,
    plan: ProductPlan,
    groups: Tensor | None = None,
) -> Tensor:
    """`five_point_product` with given seeds, each needed only for stochastic rounding.

    Torch's function modes see it as one function of its operands, like torch's own functions.
    """
    operands = (a, w) if bias is None else (a, w, bias)
    if has_torch_function(operands):
        return handle_torch_function(product_with_seeds, operands, a, w, bias, seed, weight_seed, plan, groups)
    # torch's own `apply` looks for tensors left over by torch.func, which direct operators rule out.
    apply = FivePointProduct.apply if plan.ops is DISPATCHED else _apply
    if not autocasts(a.device):
        return changeable(apply(a, w, bias, seed, weight_seed, plan, torch.is_grad_enabled(), groups))  # type: ignore[no-untyped-call]
    with without_autocast(a.device):
        return changeable(apply(a, w, bias, seed, weight_seed, plan, torch.is_grad_enabled(), groups))  # type: ignore[no-untyped-call]


class FivePointProduct(torch.autograd.Function):
    """The product with its backward pass."""

    @staticmethod
    def forward(  # noqa: D102 (torch's own)
        ctx: Any,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        weight_seed: Tensor | None,
        plan: ProductPlan,
        recording: bool,
        groups: Tensor | None,
    ) -> Tensor:
        # torch reports needs_input_grad for parameters under no_grad, too.
        needs_a, needs_w = recording and ctx.needs_input_grad[0], recording and ctx.needs_input_grad[1]
        ops, held, first, second = plan.ops, plan.carriers[0].dtype, plan.first, plan.second
        seed_of_w = seed if plan.setting.two_inputs else weight_seed
        rounded_a, left_a, kept_a = first.round(ops, a, seed, held, needs_w, groups)
        rounded_w, left_w, kept_w = second.round(ops, w, seed_of_w, held, needs_a, groups)
        observer = ctx.observer = observers.current(ops)
        if observer is not None:
            ctx.noted = first.show(observer, a, kept_a, seed, groups), second.show(observer, w, kept_w, seed_of_w, groups)
            observer.multiplies(first.forward, second.forward)
        ctx.plan, ctx.shapes, ctx.bias_dtype = plan, (a.shape, w.shape), None if bias is None else bias.dtype
        scales_a = left_a.scales if left_a is not None and needs_w and first.is_reused else None
        scales_w = left_w.scales if left_w is not None and needs_a and second.is_reused else None
        clip_a, clip_w = plan.clips
        beyond_a = beyond(a, clip_a) if needs_a and clip_a is not None else None
        beyond_w = beyond(w, clip_w) if needs_w and clip_w is not None else None
        ctx.save_for_backward(seed, weight_seed, kept_a, kept_w, scales_a, scales_w, beyond_a, beyond_w, groups)
        how = plan.arithmetics[0]
        if plan.sums or left_a is not None or left_w is not None:
            how = plan.arithmetic(ops, 0, left_a, left_w, seed)
        if groups is not None:
            how = how._replace(groups=groups)
        return not_a_view(plan.setting.product.forward(rounded_a, rounded_w, bias if plan.adds_bias else None, how))

    @staticmethod
    @refuses_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's own)
        if not autocasts(g.device):
            return _gradients(ctx, g)
        with without_autocast(g.device):
            return _gradients(ctx, g)


_apply = super(torch.autograd.Function, FivePointProduct).apply


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    seed, weight_seed, kept_a, kept_w, scales_a, scales_w, beyond_a, beyond_w, groups = ctx.saved_tensors
    plan: ProductPlan = ctx.plan
    needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
    # What was kept of operands with direct operators is like them.
    ops = operators(g, kept_a, kept_w) if plan.ops is DISPATCHED else operators(g)
    sites = None if kept_w is None else plan.grad, None if kept_a is None else plan.grad_w
    is_summed = needs_bias and plan.sums_gradient
    upstream = plan.upstream(ops, g, seed, ctx.observer, sites, plan.rounds_gradient_once, is_summed, groups)
    of_a = of_w = of_bias = None
    if kept_w is not None:
        of_a = _gradient(ctx, 1, ops, upstream, kept_w, scales_w, seed if plan.setting.two_inputs else weight_seed, beyond_a, groups)
    if kept_a is not None:
        of_w = _gradient(ctx, 2, ops, upstream, kept_a, scales_a, seed, beyond_w, groups)
    if needs_bias:
        total = plan.setting.product.grad_bias(g) if upstream.total is None else upstream.total
        of_bias = total if total.dtype == ctx.bias_dtype else total.to(ctx.bias_dtype)
    return of_a, of_w, of_bias, None, None, None, None, None


def _gradient(
    ctx: Any,
    index: int,
    ops: Operators,
    upstream: Upstream,
    kept: Tensor,
    scales: Tensor | None,
    seed: Tensor | None,
    clipped: Tensor | None,
    groups: Tensor | None,
) -> Tensor:
    """The gradient of an operand, 1 or 2, from the other one.

    Args:
        ctx: The context of the backward pass.
        index: Which operand.
        ops: The operators.
        upstream: The gradient of the result.
        kept: What was kept of the other operand.
        scales: The scales of the forward pass, if the other operand reuses them.
        seed: That with which the other operand is rounded.
        clipped: Where the gradient is zero, because the operand saturated.
        groups: The ends of the groups of rows, in products of groups.
    """
    plan: ProductPlan = ctx.plan
    observer: observers.Observer | None = ctx.observer
    site, other = (plan.grad, plan.second) if index == 1 else (plan.grad_w, plan.first)
    held = plan.carriers[index].dtype
    (rounded_g, left_g), (rounded, left) = upstream.round(site, held), other.recall(ops, kept, seed, held, scales, groups)
    if observer is not None:
        other.show_recalled(observer, kept, ctx.noted[2 - index], seed, groups)
        observer.multiplies(site, other.backward)
    how = plan.arithmetics[index]
    if plan.sums or left_g is not None or left is not None:
        how = plan.arithmetic(ops, index, left_g, left, upstream.seed)
    if groups is not None:
        how = how._replace(groups=groups)
    multiply = plan.setting.product.grad_a if index == 1 else plan.setting.product.grad_w
    found = multiply(rounded_g, rounded, ctx.shapes[index - 1], how)
    return found if clipped is None else found.masked_fill_(clipped, 0.0)
