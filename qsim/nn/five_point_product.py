"""Algorithms 1 and 2 of *Training with Fewer Bits*: a product whose operands and gradients are rounded at five points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from qsim import random
from qsim.nn import observers
from qsim.nn.autocast import without_autocast
from qsim.nn.carriers import carrier
from qsim.nn.once import once
from qsim.nn.operands import (
    GRAD,
    GRAD_W,
    Setting,
    beyond,
    clip,
    recall,
    round_and_keep,
    round_and_sum,
    round_to_carrier,
    show,
    show_recalled,
)
from qsim.nn.scaled_product import ScaledProduct


def five_point_product(a: Tensor, w: Tensor, bias: Tensor | None, setting: Setting, stream: int = 0) -> Tensor:
    """A product whose operands are rounded forward and backward.

    Args:
        a: An input.
        w: A weight, or another input.
        bias: Added to the result, not rounded.
        setting: The points and the operation.
        stream: Tells weights apart that hold the same numbers.
    """
    points = setting.points
    seed = random.seed_tensor(None, None, a.device) if points.is_stochastic else None
    weight_draws = points.weight_is_stochastic and not setting.two_inputs
    weight_seed = random.weight_seed(w, stream) if weight_draws else None
    return product_with_seeds(a, w, bias, seed, weight_seed, setting)


def product_with_seeds(
    a: Tensor, w: Tensor, bias: Tensor | None, seed: Tensor | None, weight_seed: Tensor | None, setting: Setting
) -> Tensor:
    """`five_point_product` with seeds that are given, each needed only if there is something to round stochastically.

    To torch's function modes it is one function of its operands, as torch's own are.
    """
    operands = (a, w) if bias is None else (a, w, bias)
    if has_torch_function(operands):
        return handle_torch_function(product_with_seeds, operands, a, w, bias, seed, weight_seed, setting)
    function = ScaledProduct if setting.points.is_scaled else FivePointProduct
    with without_autocast(a.device):
        return function.apply(a, w, bias, seed, weight_seed, setting, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]


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
        setting: Setting,
        recording: bool,
    ) -> Tensor:
        first, second = setting.forward_point(False), setting.forward_point(True)
        dtype = setting.dtype or torch.promote_types(a.dtype, w.dtype)
        held = carrier((first, a.dtype), (second, w.dtype), a.device, setting.product.narrow_carrier(dtype))
        # torch says that a parameter needs its gradient under no_grad, too.
        needs_a, needs_w = (recording and needed for needed in ctx.needs_input_grad[:2])
        rounded_a, kept_a = round_and_keep(a, seed, setting, False, held.dtype, needs_w)
        seed_of_w = seed if setting.two_inputs else weight_seed
        rounded_w, kept_w = round_and_keep(w, seed_of_w, setting, True, held.dtype, needs_a)
        observer = ctx.observer = observers.current()
        if observer is not None:
            ctx.noted = show(observer, a, kept_a, seed, setting, False), show(observer, w, kept_w, seed_of_w, setting, True)
        ctx.setting = setting
        ctx.facts = ((a.shape, a.dtype), (w.shape, w.dtype), None if bias is None else bias.dtype)
        clipped = [beyond(a, first) if needs_a else None, beyond(w, second) if needs_w else None]
        ctx.save_for_backward(kept_a, kept_w, seed, weight_seed, *clipped)
        added = bias if setting.draws is None or setting.draws.adds_bias else None
        return setting.product.forward(rounded_a, rounded_w, added, dtype, held.exact)

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's own)
        with without_autocast(g.device):
            return _gradients(ctx, g)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    kept_a, kept_w, seed, weight_seed, *clipped = ctx.saved_tensors
    setting: Setting = ctx.setting
    (a_shape, a_dtype), (w_shape, w_dtype), bias_dtype = ctx.facts
    points, product = setting.points, setting.product
    needs_bias = bias_dtype is not None and ctx.needs_input_grad[2]
    observer: observers.Observer | None = ctx.observer
    upstream = _Upstream(g, seed, setting, needs_bias, observer)
    gradients: list[Tensor | None] = [None] * 7
    if kept_w is not None:
        held = carrier((points.grad, g.dtype), (setting.backward_point(True), w_dtype), g.device, product.narrow_carrier(a_dtype))
        rounded_g = upstream.rounded_for(False, held.dtype)
        seed_of_w = seed if setting.two_inputs else weight_seed
        w = recall(kept_w, seed_of_w, setting, True, held.dtype)
        if observer is not None:
            show_recalled(observer, kept_w, ctx.noted[1], seed_of_w, setting, True)
        gradients[0] = clip(product.grad_a(rounded_g, w, a_shape, a_dtype, held.exact), clipped[0])
        del rounded_g, w  # the second product needs the room
    if kept_a is not None:
        point = points.grad_w or points.grad
        held = carrier((point, g.dtype), (setting.backward_point(False), a_dtype), g.device, product.narrow_carrier(w_dtype))
        rounded_g = upstream.rounded_for(True, held.dtype)
        a = recall(kept_a, seed, setting, False, held.dtype)
        if observer is not None:
            show_recalled(observer, kept_a, ctx.noted[0], seed, setting, False)
        gradients[1] = clip(product.grad_w(rounded_g, a, w_shape, w_dtype, held.exact), clipped[1])
    if needs_bias:
        gradients[2] = upstream.total().to(bias_dtype)
    return tuple(gradients)


class _Upstream:
    """The gradient of the result: rounded for the two products, and added up for the bias, as it was, from the same read if it can be."""

    def __init__(self, g: Tensor, seed: Tensor | None, setting: Setting, needs_total: bool, observer: observers.Observer | None) -> None:
        self._g, self._seed, self._setting, self._observer = g, seed, setting, observer
        self._needs_total = needs_total
        self._rounded: Tensor | None = None
        self._total: Tensor | None = None

    def rounded_for(self, second: bool, dtype: torch.dtype) -> Tensor:
        """What the product that gives the gradient of the first or of the second operand takes, in a dtype that holds it."""
        points = self._setting.points
        is_own = second and points.grad_w is not None
        if self._rounded is None or is_own:
            point, stream = (points.grad_w, GRAD_W) if is_own else (points.grad, GRAD)
            stream = self._setting.gradient_stream(stream)
            self._rounded = None
            if self._observer is not None and point is not None:
                self._observer.rounds("grad_w" if is_own else "grad", self._g, point, self._seed, stream)
            if self._needs_total and self._total is None and point is not None and self._setting.product.sums_rows:
                self._rounded, self._total = round_and_sum(self._g, point, self._seed, stream, dtype)
            else:
                self._rounded = round_to_carrier(self._g, point, self._seed, stream, dtype)
        return self._rounded.to(dtype)

    def total(self) -> Tensor:
        """The gradient of the bias."""
        return self._setting.product.grad_bias(self._g) if self._total is None else self._total
