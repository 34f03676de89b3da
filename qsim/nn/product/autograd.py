"""Algorithms 1 and 2 of *Training with Fewer Bits*: a product whose operands and gradients are rounded at five points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from qsim.nn.product import observers
from qsim.nn.product.autocast import without_autocast
from qsim.nn.product.once import once
from qsim.nn.product.operands import Kept, Upstream
from qsim.nn.product.plans import ProductPlan, Setting, plan_of
from qsim.nn.product.sites import beyond
from qsim.random import seeds


def five_point_product(a: Tensor, w: Tensor, bias: Tensor | None, setting: Setting, stream: int = 0) -> Tensor:
    """A product whose operands are rounded forward and backward.

    Args:
        a: An input.
        w: A weight, or another input.
        bias: Added to the result, not rounded.
        setting: The points and the operation.
        stream: Distinguishes weights that have the same values.
    """
    points = setting.points
    seed = seeds.seed_tensor(None, None, a.device) if points.is_stochastic else None
    weight_draws = points.weight_is_stochastic and not setting.two_inputs
    weight_seed = seeds.weight_seed(w, stream) if weight_draws else None
    return product_with_seeds(a, w, bias, seed, weight_seed, setting)


def product_with_seeds(
    a: Tensor, w: Tensor, bias: Tensor | None, seed: Tensor | None, weight_seed: Tensor | None, setting: Setting
) -> Tensor:
    """`five_point_product` with given seeds, each needed only for stochastic rounding.

    Torch's function modes see it as one function of its operands, like torch's own functions.
    """
    operands = (a, w) if bias is None else (a, w, bias)
    if has_torch_function(operands):
        return handle_torch_function(product_with_seeds, operands, a, w, bias, seed, weight_seed, setting)
    with without_autocast(a.device):
        given = (a, w, bias, seed, weight_seed, plan_of(setting, a, w), torch.is_grad_enabled())
        return FivePointProduct.apply(*given)  # type: ignore[no-any-return,no-untyped-call]


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
        # torch reports needs_input_grad for parameters under no_grad, too.
        needs_a, needs_w = recording and ctx.needs_input_grad[0], recording and ctx.needs_input_grad[1]
        held, seed_of_w = plan.carriers[0], seed if plan.two_inputs else weight_seed
        rounded_a, kept_a = plan.first.round(a, seed, held.dtype, needs_w)
        rounded_w, kept_w = plan.second.round(w, seed_of_w, held.dtype, needs_a)
        observer = ctx.observer = observers.current()
        if observer is not None:
            ctx.noted = plan.first.show(observer, a, kept_a, seed), plan.second.show(observer, w, kept_w, seed_of_w)
            observer.multiplies(plan.first.forward, plan.second.forward)
        ctx.plan, ctx.shapes, ctx.bias_dtype = plan, (a.shape, w.shape), None if bias is None else bias.dtype
        clip_a, clip_w = plan.clips
        beyond_a = beyond(a, clip_a) if needs_a and clip_a is not None else None
        beyond_w = beyond(w, clip_w) if needs_w and clip_w is not None else None
        ctx.save_for_backward(seed, weight_seed, *kept_a, *kept_w, beyond_a, beyond_w)
        how = plan.arithmetic(0, rounded_a, rounded_w, seed)
        return plan.product.forward(rounded_a.values, rounded_w.values, bias if plan.adds_bias else None, how)

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's own)
        with without_autocast(g.device):
            return _gradients(ctx, g)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    seed, weight_seed, a_or_codes, scales_a, w, scales_w, beyond_a, beyond_w = ctx.saved_tensors
    kept_a, kept_w = Kept(a_or_codes, scales_a), Kept(w, scales_w)
    plan: ProductPlan = ctx.plan
    seed_of_w = seed if plan.two_inputs else weight_seed
    needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
    needed = kept_w.values is not None, kept_a.values is not None
    upstream = plan.upstream(g, seed, ctx.observer, needed, needs_bias)
    gradients: list[Tensor | None] = [None] * 7
    if needed[0]:
        gradients[0] = _gradient(ctx, 1, upstream, kept_w, seed_of_w, beyond_a)
    if needed[1]:
        gradients[1] = _gradient(ctx, 2, upstream, kept_a, seed, beyond_w)
    if needs_bias:
        total = plan.product.grad_bias(g) if upstream.total is None else upstream.total
        gradients[2] = total.to(ctx.bias_dtype)
    return tuple(gradients)


def _gradient(ctx: Any, index: int, upstream: Upstream, kept: Kept, seed: Tensor | None, clipped: Tensor | None) -> Tensor:
    """The gradient of an operand, 1 or 2, from the other one.

    Args:
        ctx: The context of the backward pass.
        index: Which operand.
        upstream: The gradient of the result.
        kept: What was kept of the other operand.
        seed: That with which the other operand is rounded.
        clipped: Where the gradient is zero, because the operand saturated.
    """
    plan: ProductPlan = ctx.plan
    observer: observers.Observer | None = ctx.observer
    site, other = (plan.grad, plan.second) if index == 1 else (plan.grad_w, plan.first)
    held = plan.carriers[index].dtype
    rounded_g, rounded = upstream.round(site, held), other.recall(kept, seed, held)
    if observer is not None:
        other.show_recalled(observer, kept, ctx.noted[2 - index], seed)
        observer.multiplies(site, other.backward)
    how = plan.arithmetic(index, rounded_g, rounded, upstream.seed)
    multiply = plan.product.grad_a if index == 1 else plan.product.grad_w
    found = multiply(rounded_g.values, rounded.values, ctx.shapes[index - 1], how)
    return found if clipped is None else found.masked_fill_(clipped, 0.0)
