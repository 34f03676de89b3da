"""Algorithms 1 and 2 of *Training with Fewer Bits*: a product whose operands and gradients are rounded at five points.

Three products of two rounded operands are computed by one method, `Multiplication.multiply`: forward, for the gradient of the first
operand, and for that of the second.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.overrides import handle_torch_function, has_torch_function

from qsim.functional.applying import applied, changeable, not_a_view
from qsim.nn.product import observers, outside
from qsim.nn.product.autocast import autocasts, without_autocast
from qsim.nn.product.double_backward import refuses_double_backward
from qsim.nn.product.functorch import transformed_product
from qsim.nn.product.plans import ProductPlan, Split
from qsim.nn.product.sites import RoundedOperand, Site
from qsim.random import seeds
from qsim.random.shards import is_distributed
from qsim.random.sources import Stream
from qsim_kernels.ops.direct import DISPATCHED, Operators, operators

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
        a, w, bias = plan.cast(a, w, bias)
    if not plan.points.wraps:
        return _product(a, w, bias, plan, stream, ends)
    if _are_distributed(a, w, bias):
        raise ValueError(f"{outside.first_point(plan.points)} does not take distributed tensors (DTensor): {_INSTEAD}")
    split = plan.split
    if split is not None and split.tensor < 2:
        bias = None if bias is None else outside.rounded("bias", bias, plan)
        result = _split_product((a, w), bias, split, stream, ends)
    else:
        a, w, bias, raw = outside.operands(a, w, bias, plan)
        result = _product(a, w, bias, plan, stream, ends, raw)
    return outside.rounded("output", result, plan)


def _split_product(
    operands: tuple[Tensor, Tensor], bias: Tensor | None, split: Split, stream: Stream, ends: Tensor | None
) -> Tensor:
    """The product of what is rounded of an operand, and that of its outliers."""
    rounded, rest = split.parts(operands[split.tensor])
    a, w = operands
    if split.tensor == 0:
        return planned(rounded, w, bias, split.rounded, stream, ends) + planned(rest, w, None, split.rest, stream, ends)
    return planned(a, rounded, bias, split.rounded, stream, ends) + planned(a, rest, None, split.rest, stream, ends)


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
        from qsim.nn.sharded.embedding import sharded_lookup
        from qsim.nn.sharded.product import sharded_product

        return sharded_lookup(a, w, plan, stream) if plan.product.is_lookup else sharded_product(a, w, bias, plan, stream)
    if not is_direct and torch._C._are_functorch_transforms_active():
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
        seed_of_w = _seed_of_second(plan, second.forward, seed, weight_seed)
        x = first.round(ops, a, seed, carrier, keeps=needs_w, raw=raw_a)
        y = second.round(ops, w, seed_of_w, carrier, keeps=needs_a, raw=raw_w)
        if observer is not None:
            ctx.noted = first.show(observer, a, x, seed), second.show(observer, w, y, seed_of_w)
            if not plan.product.is_lookup:
                observer.multiplies(plan.pairs[0])
        ctx.save_for_backward(
            seed,
            weight_seed,
            ends,
            x.kept,
            y.kept if needs_a else None,
            x.scales if needs_w and first.is_reused else None,
            y.scales if needs_a and second.is_reused else None,
            first.forward.saturates(a) if first.clips and needs_a else None,
            second.forward.saturates(w) if second.clips and needs_w else None,
        )
        return not_a_view(plan.products[0].multiply(ops, x, y, bias if plan.adds_bias else None, seed, ends))

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
    seed, weight_seed, ends, kept_a, kept_w, scales_a, scales_w, beyond_a, beyond_w = ctx.saved_tensors
    plan = plan if ends is None else plan.in_groups(ends, is_observed=ctx.observer is not None)
    # What was kept of operands with direct operators is like them.
    ops = operators(g, kept_a, kept_w) if plan.ops is DISPATCHED else operators(g)
    needs_both = kept_a is not None and kept_w is not None
    run = _BackwardPass(plan, ops, g, seed, weight_seed, ends, ctx.observer, ctx.noted if ctx.observer is not None else (None, None))
    of_a = of_w = of_bias = total = z = None
    if needs_both and plan.joins_gradients:
        x, _, total = run.upstream(1, needs_both=True, sums=sums)
        y, a = run.recalled(1, kept_w, scales_w), run.recalled(2, kept_a, scales_a)
        of_a, of_w = run.joint_products(x, y, a)
    else:
        if kept_w is not None:
            x, z, total = run.upstream(1, needs_both=needs_both, sums=sums)
            of_a = run.product(1, x, run.recalled(1, kept_w, scales_w), ctx.shapes[0])
            del x  # before the other product is computed
        if kept_a is not None:
            if z is None:
                z, _, more = run.upstream(2, needs_both=False, sums=sums and total is None)
                total = more if total is None else total
            of_w = run.product(2, z, run.recalled(2, kept_a, scales_a), ctx.shapes[1])
    if sums:
        total = plan.product.grad_bias(g) if total is None else total
        of_bias = total if total.dtype == ctx.bias_dtype else total.to(ctx.bias_dtype)
    return _unless(beyond_a, of_a), _unless(beyond_w, of_w), of_bias


class _BackwardPass(NamedTuple):
    """The values that the two products of a backward pass share."""

    plan: ProductPlan
    ops: Operators
    g: Tensor
    seed: Tensor | None
    weight_seed: Tensor | None
    ends: Tensor | None
    observer: observers.Observer | None
    noted: tuple[Any, Any]

    def upstream(self, index: int, *, needs_both: bool, sums: bool) -> tuple[RoundedOperand, RoundedOperand | None, Tensor | None]:
        """The gradient of the result, rounded for a product, for the other one, if it comes from the same read, and summed, likewise."""
        gradient = self.plan.gradient
        x, other, total = gradient.round(self.ops, self.g, self.seed, self.plan.products, index, needs_both=needs_both, sums=sums)
        if self.observer is not None:
            (gradient.for_first if index == 1 else gradient.for_second).show(self.observer, self.g, self.seed, x)
            if other is not None and not gradient.is_rounded_once:
                gradient.for_second.show(self.observer, self.g, self.seed, other)
        return x, other, total

    def recalled(self, index: int, kept: Tensor, scales: Tensor | None) -> RoundedOperand:
        """The operand of a product, from what was kept of it."""
        plan = self.plan
        operand = plan.second if index == 1 else plan.first
        seed = self.seed if index == 2 else _seed_of_second(plan, operand.backward, self.seed, self.weight_seed)
        rounded = operand.recall(self.ops, kept, seed, plan.products[index].carrier, scales)
        if self.observer is not None:
            operand.show_recalled(self.observer, kept, rounded, self.noted[2 - index], seed)
        return rounded

    def product(self, index: int, x: RoundedOperand, y: RoundedOperand, shape: torch.Size) -> Tensor:
        """The gradient of an operand."""
        self._announce(index)
        return self.plan.products[index].multiply(self.ops, x, y, shape, self.seed, self.ends)

    def joint_products(self, x: RoundedOperand, y: RoundedOperand, a: RoundedOperand) -> tuple[Tensor, Tensor]:
        """The gradients of both operands from one operator."""
        self._announce(1, 2)
        _, first, second = self.plan.products
        hows = first.of(self.ops, x, y, self.seed, None), second.of(self.ops, x, a, self.seed, None)
        return self.plan.product.gradients(x.values, y.values, a.values, *hows)

    def _announce(self, *indices: int) -> None:
        """Tell an observer, if there is one, which products the next operator computes."""
        if self.observer is not None and not self.plan.product.is_lookup:
            self.observer.multiplies(*(self.plan.pairs[index] for index in indices))


def _seed_of_second(plan: ProductPlan, site: Site, seed: Tensor | None, weight_seed: Tensor | None) -> Tensor | None:
    """The seed of the second operand at a site: that of the call, for another input and where it shares signs with the first."""
    shares_signs = site.call is not None and site.draws_signs
    return seed if plan.two_inputs or shares_signs else weight_seed


def _unless(clipped: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The gradient of an operand, zero where the operand was clipped."""
    return gradient if clipped is None or gradient is None else gradient.masked_fill_(clipped, 0.0)
