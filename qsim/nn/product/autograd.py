"""Algorithms 1 and 2 of *Training with Fewer Bits*: a product whose operands and gradients are rounded at five points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from qsim.functional.applying import applied, changeable, not_a_view
from qsim.nn.product import observers
from qsim.nn.product.autocast import autocasts, without_autocast
from qsim.nn.product.bilinear import BackwardOperands
from qsim.nn.product.double_backward import refuses_double_backward
from qsim.nn.product.operands import Received, Upstream
from qsim.nn.product.plans import ProductPlan
from qsim.nn.product.sites import beyond
from qsim.random import seeds
from qsim.random.sources import Stream
from qsim_kernels.ops.direct import DISPATCHED, Operators, operators


def planned_product(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan, stream: Stream = 0) -> Tensor:
    """A product whose operands are rounded forward and backward.

    Args:
        a: An input.
        w: A weight, or another input.
        bias: Added to the result, not rounded.
        plan: The plan for such operands.
        stream: Distinguishes weights that have the same values.
    """
    seed, weight_seed = drawn_seeds(a, w, plan, stream)
    if plan.ops is DISPATCHED or torch.is_autocast_enabled(a.device.type):
        return product_with_seeds(a, w, bias, seed, weight_seed, plan)
    return _apply(a, w, bias, seed, weight_seed, plan, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]


def drawn_seeds(a: Tensor, w: Tensor, plan: ProductPlan, stream: Stream) -> tuple[Tensor | None, Tensor | None]:
    """The seed of a product, and that of its weight, where they are needed."""
    points, ops = plan.setting.points, plan.ops
    seed = seeds.drawn(a.device, ops, stream) if points.is_stochastic else None
    weight_draws = points.weight_is_stochastic and not plan.setting.two_inputs
    return seed, seeds.weight_seed(w, stream, ops=ops, redraws=points.redraws_weight) if weight_draws else None


def product_with_seeds(
    a: Tensor, w: Tensor, bias: Tensor | None, seed: Tensor | None, weight_seed: Tensor | None, plan: ProductPlan
) -> Tensor:
    """`planned_product` with given seeds, each needed only for stochastic rounding.

    Torch's function modes see it as one function of its operands, like torch's own functions.
    """
    operands = (a, w) if bias is None else (a, w, bias)
    if has_torch_function(operands):
        return handle_torch_function(product_with_seeds, operands, a, w, bias, seed, weight_seed, plan)
    with without_autocast(a.device):
        return changeable(applied(FivePointProduct, plan.ops)(a, w, bias, seed, weight_seed, plan, torch.is_grad_enabled()))


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
    ) -> Tensor:
        ctx.plan = plan
        result, saved = multiplied(ctx, plan, a, w, bias, seed, weight_seed, recording)
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    @refuses_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's own)
        if not autocasts(g.device):
            return *gradients(ctx, ctx.plan, ctx.saved_tensors, g), None, None, None, None
        with without_autocast(g.device):
            return *gradients(ctx, ctx.plan, ctx.saved_tensors, g), None, None, None, None


_apply = super(torch.autograd.Function, FivePointProduct).apply


#: What the backward pass needs: both seeds, what was kept of either operand for the gradient of the other one, their scales if they are
#: reused, and where they saturated if their gradients are zero there.
Saved = Sequence[Tensor | None]


def multiplied(
    ctx: Any, plan: ProductPlan, a: Tensor, w: Tensor, bias: Tensor | None, seed: Tensor | None, weight_seed: Tensor | None, recording: bool
) -> tuple[Tensor, Saved]:
    """The forward pass: the result, and what the backward pass needs."""
    # torch reports needs_input_grad for parameters under no_grad, too.
    needs_a, needs_w = recording and ctx.needs_input_grad[0], recording and ctx.needs_input_grad[1]
    ops, first, second, how = plan.ops, plan.first, plan.second, plan.arithmetics[0]
    seed_of_w = seed if plan.setting.two_inputs else weight_seed
    rounded_a, left_a, kept_a = first.round(ops, a, seed, how.held, needs_w)
    rounded_w, left_w, kept_w = second.round(ops, w, seed_of_w, how.held, needs_a)
    observer = ctx.observer = observers.current(ops)
    if observer is not None:
        ctx.noted = first.show(observer, a, kept_a, seed), second.show(observer, w, kept_w, seed_of_w)
        observer.multiplies((first.forward, second.forward))
    ctx.shapes, ctx.bias_dtype = (a.shape, w.shape), None if bias is None else bias.dtype
    is_plain = how.sum is None and left_a is None and left_w is None
    arithmetic = how.plain if is_plain else how.after(ops, left_a, left_w, seed)
    result = not_a_view(plan.setting.product.forward(rounded_a, rounded_w, bias if plan.adds_bias else None, arithmetic))
    return result, (
        seed,
        weight_seed,
        kept_a,
        kept_w,
        left_a.scales if left_a is not None and needs_w and first.is_reused else None,
        left_w.scales if left_w is not None and needs_a and second.is_reused else None,
        beyond(a, first.forward) if first.clips and needs_a else None,
        beyond(w, second.forward) if second.clips and needs_w else None,
    )


def gradients(ctx: Any, plan: ProductPlan, saved: Saved, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The backward pass: the gradients of both operands and of the bias, where they are needed."""
    seed, weight_seed, kept_a, kept_w, scales_a, scales_w, beyond_a, beyond_w = saved
    needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
    # What was kept of operands with direct operators is like them.
    ops = operators(g, kept_a, kept_w) if plan.ops is DISPATCHED else operators(g)
    upstream = plan.gradient.upstream(Received(ops, g, seed, ctx.observer, kept_w is not None, kept_a is not None, needs_bias))
    of_a = of_w = of_bias = None
    product, seed_of_w = plan.setting.product, seed if plan.setting.two_inputs else weight_seed
    one = two = None
    if kept_w is not None:
        one = _operands(ctx, plan, 1, ops, upstream, kept_w, scales_w, seed_of_w)
        if kept_a is not None and product.joins_gradients:
            two = _operands(ctx, plan, 2, ops, upstream, kept_a, scales_a, seed)
    if one is not None and two is not None and product.joins(one, two):
        _announce(ctx.observer, plan, 1, 2)
        of_a, of_w = product.gradients(one, two)
    else:
        if one is not None:
            _announce(ctx.observer, plan, 1)
            of_a = product.grad_a(one[0], one[1], ctx.shapes[0], one[2])
            one = None
        if kept_a is not None:
            two = two or _operands(ctx, plan, 2, ops, upstream, kept_a, scales_a, seed)
            _announce(ctx.observer, plan, 2)
            of_w = product.grad_w(two[0], two[1], ctx.shapes[1], two[2])
    if needs_bias:
        total = plan.setting.product.grad_bias(g) if upstream.total is None else upstream.total
        of_bias = total if total.dtype == ctx.bias_dtype else total.to(ctx.bias_dtype)
    return _unless(beyond_a, of_a), _unless(beyond_w, of_w), of_bias


def _operands(
    ctx: Any, plan: ProductPlan, index: int, ops: Operators, upstream: Upstream, kept: Tensor, scales: Tensor | None, seed: Tensor | None
) -> BackwardOperands:
    """The operands of the product that gives the gradient of an operand, 1 or 2, from what was kept of the other one."""
    observer: observers.Observer | None = ctx.observer
    site, other = (plan.gradient.for_first, plan.second) if index == 1 else (plan.gradient.for_second, plan.first)
    how = plan.arithmetics[index]
    (rounded_g, left_g), (rounded, left) = upstream.round(site, how.held), other.recall(ops, kept, seed, how.held, scales)
    if observer is not None:
        other.show_recalled(observer, kept, ctx.noted[2 - index], seed)
    is_plain = how.sum is None and left_g is None and left is None
    return rounded_g, rounded, how.plain if is_plain else how.after(ops, left_g, left, upstream.seed)


def _announce(observer: observers.Observer | None, plan: ProductPlan, *indices: int) -> None:
    """Tell an observer, if there is one, whose gradients the next operator computes: the first operand's, 1, the second's, 2, or both."""
    if observer is not None:
        products = {1: (plan.gradient.for_first, plan.second.backward), 2: (plan.gradient.for_second, plan.first.backward)}
        observer.multiplies(*(products[index] for index in indices))


def _unless(clipped: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The gradient of an operand, zero where the operand was clipped."""
    return gradient if clipped is None or gradient is None else gradient.masked_fill_(clipped, 0.0)
