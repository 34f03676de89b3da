"""Algorithms 1 and 2 of *Training with Fewer Bits*: a product whose operands and gradients are rounded at five points.

Three products of two rounded operands are computed by one method, `Multiplication.multiply`: forward, for the gradient of the first
operand, and for that of the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.overrides import handle_torch_function, has_torch_function

from qsim.functional.applying import applied, changeable, not_a_view, refuses_double_backward
from qsim.nn.product import observers, outside
from qsim.nn.product.autocast import autocasts, without_autocast
from qsim.nn.product.functorch import transformed_product
from qsim.nn.product.plans import ProductPlan
from qsim.random import seeds
from qsim.random.shards import is_distributed
from qsim.random.sources import Stream, is_exporting
from qsim_kernels.lowered import inductor
from qsim_kernels.ops.direct import DISPATCHED, operators
from qsim_kernels.private import is_in_transform

#: What to do with distributed tensors instead.
_INSTEAD = "give a format or a Quantizer, or shard with FSDP2, whose layers multiply whole tensors"


def planned(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan, stream: Stream = 0, ends: Tensor | None = None) -> Tensor:
    """A product whose operands are rounded forward and backward.

    Args:
        a: An input.
        w: A weight, or another input.
        bias: Added to the result.
        plan: The plan for such operands.
        stream: Distinguishes weights that have the same values.
        ends: The ends of the groups of rows, in a grouped product.
    """
    if plan.casts is not None:
        of_a, of_w, of_bias = plan.casts
        a, w, bias = a.to(of_a), w.to(of_w), None if bias is None else bias.to(of_bias)
    if not plan.points.wraps:
        return _product(a, w, bias, plan, stream, ends)
    if _are_distributed(a, w, bias):
        raise ValueError(f"{outside.first_point(plan.points)} does not take distributed tensors (DTensor): {_INSTEAD}")
    split = plan.split
    if split is not None and split.tensor < 2:
        bias = None if bias is None else outside.rounded("bias", bias, plan.points.bias)
        parts = split.parts((a, w)[split.tensor])
        one, other = [(part, w) if split.tensor == 0 else (a, part) for part in parts]
        result = planned(*one, bias, split.rounded, stream, ends) + planned(*other, None, split.rest, stream, ends)
    else:
        a, w, raw = outside.operands(a, w, plan)
        bias = None if bias is None else outside.rounded("bias", bias, plan.points.bias)
        result = _product(a, w, bias, plan, stream, ends, raw)
    return outside.rounded("output", result, plan.points.output)


def _product(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: ProductPlan,
    stream: Stream,
    ends: Tensor | None,
    raw: outside.Raw = (None, None),
) -> Tensor:
    """The product of whole tensors or of distributed ones, of plain code or under the transforms of `torch.func`."""
    is_direct = plan.ops is not DISPATCHED
    if not is_direct and _are_distributed(a, w, bias):
        if plan.split is not None:
            raise ValueError(f"grad: Outliers would get the shard of a distributed tensor: {_INSTEAD}")
        from qsim.nn.sharded.product import sharded_product

        return sharded_product(a, w, bias, plan, stream)
    if not is_direct and is_in_transform():
        return transformed_product(a, w, bias, plan)
    seed = seeds.drawn(w.device, plan.ops, stream) if plan.draws else None
    weight_seed = seeds.weight_seed(w, stream, ops=plan.ops, redraws=plan.points.redraws_weight) if plan.weight_draws else None
    if not is_direct or torch.is_autocast_enabled(w.device.type):
        return product_with_seeds(a, w, bias, seed, weight_seed, plan, ends, raw)
    return _apply(a, w, bias, seed, weight_seed, ends, *raw, plan, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]


def _are_distributed(a: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether one of the operands is a distributed tensor, which exist only in distributed runs."""
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return any(x is not None and is_distributed(x) for x in (a, w, bias))


def product_with_seeds(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    weight_seed: Tensor | None,
    plan: ProductPlan,
    ends: Tensor | None = None,
    raw: outside.Raw = (None, None),
) -> Tensor:
    """`planned` with given seeds, each needed only for stochastic rounding.

    Torch's function modes see it as one function of its operands, like torch's own functions.
    """
    operands = (a, w) if bias is None else (a, w, bias)
    if has_torch_function(operands):
        return handle_torch_function(product_with_seeds, operands, a, w, bias, seed, weight_seed, plan, ends, raw)
    if plan.in_graph is not None and ends is None and not is_exporting():
        return changeable(plan.in_graph(a, w, bias, seed, weight_seed))
    with without_autocast(w.device):
        return changeable(applied(FivePointProduct, plan.ops)(a, w, bias, seed, weight_seed, ends, *raw, plan, torch.is_grad_enabled()))


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
        ends: Tensor | None,
        raw_a: Tensor | None,
        raw_w: Tensor | None,
        plan: ProductPlan,
        recording: bool,
    ) -> Tensor:
        # torch reports needs_input_grad for parameters under no_grad, too.
        needs_a, needs_w = recording and ctx.needs_input_grad[0], recording and ctx.needs_input_grad[1]
        ctx.plan, ctx.shapes, ctx.bias_dtype = plan, (a.shape, w.shape), None if bias is None else bias.dtype
        ops = plan.ops
        observer = ctx.observer = observers.current(ops)
        plan = plan if ends is None else plan.in_groups(ends, is_observed=observer is not None)
        first, second, carrier = plan.first, plan.second, plan.products[0].carrier
        # A callable at the second operand may share random signs with the first.
        seed_of_w = seed if plan.two_inputs or second.forward.call is not None else weight_seed
        x, kept_a = first.round(ops, a, seed, carrier, keeps=needs_w, raw=raw_a)
        y, kept_w = second.round(ops, w, seed_of_w, carrier, keeps=needs_a, raw=raw_w)
        if observer is not None:
            ctx.noted = first.show(observer, a, x, kept_a, seed), second.show(observer, w, y, kept_w, seed_of_w)
            observer.multiplies(*plan.pairs[:1])
        ctx.save_for_backward(
            seed,
            weight_seed,
            ends,
            kept_a,
            kept_w,
            x.scales if needs_w and first.is_reused else x.ahead,
            y.scales if needs_a and second.is_reused else y.ahead,
            first.forward.saturates(a) if first.clips and needs_a else None,
            second.forward.saturates(w) if second.clips and needs_w else None,
        )
        result = not_a_view(plan.products[0].multiply(ops, x, y, bias if plan.adds_bias else None, seed, ends))
        if ops is not DISPATCHED or not torch.compiler.is_compiling() or is_exporting() or (seed is None and weight_seed is None):
            return result
        # Dynamo cannot ask what its compiler will do.
        needs_seeds = plan.shares_signs or torch.compiler.is_dynamo_compiling() or inductor.records_graphs()
        return torch.ops.qsim.with_seeds.default(result, [seed, weight_seed], plan.shares_signs) if needs_seeds else result

    @staticmethod
    @refuses_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's own)
        if not autocasts(g.device):
            return *_gradients(ctx, g), None, None, None, None, None, None, None
        with without_autocast(g.device):
            return *_gradients(ctx, g), None, None, None, None, None, None, None


_apply = super(torch.autograd.Function, FivePointProduct).apply


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of both operands and of the bias, where they are needed."""
    sums = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
    split = ctx.plan.split
    if split is None:
        return _gradients_by(ctx, ctx.plan, g, sums=sums)
    rounded, rest = split.parts(g)
    one, other = _gradients_by(ctx, split.rounded, rounded, sums=False), _gradients_by(ctx, split.rest, rest, sums=False)
    of_a, of_w = (None if x is None or y is None else x + y for x, y in zip(one[:2], other[:2], strict=True))
    return of_a, of_w, ctx.plan.product.grad_bias(g).to(ctx.bias_dtype) if sums else None


def _gradients_by(ctx: Any, plan: ProductPlan, g: Tensor, *, sums: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients by a plan: the product's own, or that of a part of the gradient."""
    seed, weight_seed, ends, kept_a, kept_w, known_a, known_w, beyond_a, beyond_w = ctx.saved_tensors
    plan = plan if ends is None else plan.in_groups(ends, is_observed=ctx.observer is not None)
    # What was kept of operands with direct operators is like them.
    ops = operators(g, kept_a, kept_w) if plan.ops is DISPATCHED else operators(g)
    needs_both = kept_a is not None and kept_w is not None
    joins, observer, gradient, (_, for_first, for_second) = needs_both and plan.joins_gradients, ctx.observer, plan.gradient, plan.products
    note_a, note_w = ctx.noted if observer is not None else (None, None)
    of_a = of_w = of_bias = total = z = ahead = None
    y: Any = None
    if kept_w is not None:
        carriers = (for_first.carrier, for_second.carrier) if needs_both else (for_first.carrier,)
        x, z, total = gradient.round(ops, g, seed, carriers, observer, sums=sums)
        seed_of_w = seed if plan.two_inputs or plan.second.backward.call is not None else weight_seed
        y = plan.second.recall(ops, kept_w, seed_of_w, for_first.carrier, known_w)
        if observer is not None:
            plan.second.show_recalled(observer, kept_w, y, note_w, seed_of_w)
            observer.multiplies(*plan.pairs[1 : 1 if joins else 2])
        if not joins:
            of_a = for_first.multiply(ops, x, y, ctx.shapes[0], seed, ends)
            y = None
        ahead = x.ahead
        del x  # before the other product is computed
    if kept_a is not None:
        if z is None:
            more_sums = sums and total is None
            z, _, more = gradient.round(ops, g, seed, (for_second.carrier,), observer, sums=more_sums, is_second=True, known=ahead)
            total = more if total is None else total
        a = plan.first.recall(ops, kept_a, seed, for_second.carrier, known_a)
        if observer is not None:
            plan.first.show_recalled(observer, kept_a, a, note_a, seed)
            observer.multiplies(*plan.pairs[1 if joins else 2 :])
        if joins:
            hows = for_first.of(ops, z, y, seed, None), for_second.of(ops, z, a, seed, None)
            of_a, of_w = plan.product.gradients(z.values, y.values, a.values, *hows)
        else:
            of_w = for_second.multiply(ops, z, a, ctx.shapes[1], seed, ends)
    if beyond_a is not None and of_a is not None:
        of_a = of_a.masked_fill_(beyond_a, 0.0)
    if beyond_w is not None and of_w is not None:
        of_w = of_w.masked_fill_(beyond_w, 0.0)
    if sums:
        total = plan.product.grad_bias(g) if total is None else total
        of_bias = total if total.dtype == ctx.bias_dtype else total.to(ctx.bias_dtype)
    return of_a, of_w, of_bias
