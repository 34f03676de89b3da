"""Products under the transforms of `torch.func`: composed of operators that these can follow, where nothing is drawn or remembered."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import TransformType

from qsim.nn.histories import Recorded
from qsim.nn.product.autocast import without_autocast
from qsim.nn.product.double_backward import refuses_double_backward
from qsim.nn.product.plans import ProductPlan
from qsim.nn.product.sites import beyond, leaves_factor
from qsim.recipes.five_point import POINTS, FivePoint
from qsim_kernels.ops.direct import DISPATCHED

_INSTEAD = "use backward() or torch.autograd.grad, or take the points away with qsim.revert(model)"


def check_transforms(points: FivePoint) -> None:
    """Raise an error for points that transforms do not support."""
    scales = [getattr(getattr(points, name), "scale", None) for name in POINTS]
    reasons = {
        "random bits": points.is_stochastic or points.weight_is_stochastic,
        "an accumulator": points.accumulate is not None,
        "delayed scales": any(isinstance(scale, Recorded) for scale in scales),
    }
    for reason, is_there in reasons.items():
        if is_there:
            raise _error(f"layers with {reason}")


def transformed_lookup() -> NoReturn:
    """Raise an error: lookups in a table do not support transforms."""
    raise _error("embeddings with points")


def _error(what: str) -> RuntimeError:
    return RuntimeError(f"{what} do not support the transforms of torch.func (grad, vmap, …): {_INSTEAD}")


def transformed_product(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan) -> Tensor:
    """`planned_product` under a transform: the same roundings and products."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "compiled code cannot apply the transforms of torch.func (grad, vmap, …) to layers with points: call torch.compiler.disable on "
            "the function that applies them, or use backward()"
        )
    _check_levels(plan)
    with without_autocast(a.device):
        return _ProductUnderTransform.apply(a, w, bias, plan)  # type: ignore[no-any-return,no-untyped-call]


def _check_levels(plan: ProductPlan) -> None:
    """Raise an error for gradients of gradients, and for scales that vmap does not support: results are multiplied by them."""
    levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or []]
    if levels.count(TransformType.Grad) > 1:
        raise RuntimeError("rounding at points cannot be differentiated twice: give one of grad, vjp and jacrev")
    if TransformType.Vmap in levels and any(map(leaves_factor, plan.sites)):
        raise _error("under vmap, layers with scales of whole tensors or rows")


class _ProductUnderTransform(torch.autograd.Function):
    """The product with its backward pass, which rounds again instead of keeping codes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan) -> Tensor:
        how = plan.arithmetics[0]
        first, left_a = plan.first.forward.round(DISPATCHED, a, None, how.held)
        second, left_w = plan.second.forward.round(DISPATCHED, w, None, how.held)
        return plan.setting.product.forward(first, second, bias, how.after(DISPATCHED, left_a, left_w, None))

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
        of_bias = plan.setting.product.grad_bias(g).to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        with without_autocast(g.device):
            of_a = _gradient(plan, 1, g, w, a) if ctx.needs_input_grad[0] else None
            of_w = _gradient(plan, 2, g, a, w) if ctx.needs_input_grad[1] else None
        return of_a, of_w, of_bias, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise RuntimeError("layers with points have no forward-mode derivative (jvp, jacfwd, hessian): use grad, vjp or jacrev")


def _gradient(plan: ProductPlan, index: int, g: Tensor, other: Tensor, own: Tensor) -> Tensor:
    """The gradient of an operand, 1 or 2, from the other one."""
    how = plan.arithmetics[index]
    site, operand, same = (
        (plan.gradient.for_first, plan.second, plan.first) if index == 1 else (plan.gradient.for_second, plan.first, plan.second)
    )
    rounded_g, left_g = site.round(DISPATCHED, g, None, how.held)
    rounded, left = operand.backward.round(DISPATCHED, other, None, how.held)
    multiply = plan.setting.product.grad_a if index == 1 else plan.setting.product.grad_w
    found = multiply(rounded_g, rounded, own.shape, how.after(DISPATCHED, left_g, left, None))
    return torch.where(beyond(own, same.forward), 0.0, found) if same.clips else found
