"""Products under the transforms of `torch.func`: composed of operators that these can follow, where nothing is drawn or remembered."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from qsim.functional.applying import refuses_double_backward
from qsim.nn.product.autocast import without_autocast
from qsim.nn.product.plans import ProductPlan
from qsim.private import TransformType, transforms
from qsim_kernels.ops.direct import DISPATCHED


def transformed_product(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan) -> Tensor:
    """`planned` under a transform: the same roundings and products."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "compiled code cannot apply the transforms of torch.func (grad, vmap, …) to layers with points: call torch.compiler.disable on "
            "the function that applies them, or use backward()"
        )
    _check_plan(plan)
    _check_levels(plan)
    with without_autocast(a.device):
        return _ProductUnderTransform.apply(a, w, bias, plan)  # type: ignore[no-any-return,no-untyped-call]


def _check_plan(plan: ProductPlan) -> None:
    """Raise an error for products that draw or remember something, or that these transforms cannot follow."""
    points, scales = plan.points, [site.quantizer.scale for site in plan.sites if site.quantizer is not None]
    reasons = {
        "layers with random bits": points.is_stochastic or points.weight_is_stochastic,
        "layers with an accumulator": points.accumulate is not None,
        "layers with delayed scales": any(scale is not None and scale.is_recorded for scale in scales),
        "embeddings with points": plan.product.is_lookup,
        "layers with Outliers at grad": plan.split is not None,
        "layers whose operands share random signs": plan.shares_signs,
    }
    for reason, is_there in reasons.items():
        if is_there:
            _refuse(reason)


def _check_levels(plan: ProductPlan) -> None:
    """Raise an error for gradients of gradients, and for scales that vmap does not support: results are multiplied by them."""
    levels = [level.key() for level in transforms() or ()]
    if levels.count(TransformType.Grad) > 1:
        raise RuntimeError("rounding at points cannot be differentiated twice: give one of grad, vjp and jacrev")
    if TransformType.Vmap in levels and any(site.leaves_factor for site in plan.sites):
        _refuse("under vmap, layers with scales of whole tensors or rows")


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what} do not support the transforms of torch.func (grad, vmap, …): use backward() or torch.autograd.grad, or take the points "
        "away with qsim.revert(model)"
    )


class _ProductUnderTransform(torch.autograd.Function):
    """The product with its backward pass, which rounds again instead of keeping codes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan) -> Tensor:
        carrier = plan.products[0].carrier
        x, y = (operand.forward.round(DISPATCHED, own, None, carrier) for operand, own in ((plan.first, a), (plan.second, w)))
        return plan.products[0].multiply(DISPATCHED, x, y, bias, None, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, w, bias, ctx.plan = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(a, w)

    @staticmethod
    @refuses_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, w = ctx.saved_tensors
        plan: ProductPlan = ctx.plan
        _check_levels(plan)
        of_bias = plan.product.grad_bias(g).to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        with without_autocast(g.device):
            of_a = _gradient(plan, 1, g, w, a) if ctx.needs_input_grad[0] else None
            of_w = _gradient(plan, 2, g, a, w) if ctx.needs_input_grad[1] else None
        return of_a, of_w, of_bias, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise RuntimeError("layers with points have no forward-mode derivative (jvp, jacfwd, hessian): use grad, vjp or jacrev")


def _gradient(plan: ProductPlan, index: int, g: Tensor, other: Tensor, own: Tensor) -> Tensor:
    """The gradient of an operand, 1 or 2, from the other one."""
    site = plan.gradient.for_first if index == 1 else plan.gradient.for_second
    given, wanted = (plan.second, plan.first) if index == 1 else (plan.first, plan.second)
    carrier = plan.products[index].carrier
    kept = given.forward.restored(DISPATCHED, other, None) if given.is_requantized else other
    x, y = site.round(DISPATCHED, g, None, carrier), given.backward.round(DISPATCHED, kept, None, carrier)
    gradient = plan.products[index].multiply(DISPATCHED, x, y, own.shape, None, None)
    return torch.where(wanted.forward.saturates(own), 0.0, gradient) if wanted.clips else gradient
