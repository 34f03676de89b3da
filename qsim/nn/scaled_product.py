"""`qsim.nn.five_point_product` where points have scales or transforms: every operand is rounded along what its product sums over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim.nn import observers
from qsim.nn.autocast import without_autocast
from qsim.nn.carriers import Carrier, carrier_of
from qsim.nn.once import once
from qsim.nn.operands import GRAD, GRAD_W, Setting, beyond, clip
from qsim.nn.scaled_operands import (
    Point,
    Rounded,
    forward_operands,
    leaves_factor,
    operands_of_grad_a,
    operands_of_grad_w,
    round_scaled,
    values_of,
)


class ScaledProduct(torch.autograd.Function):
    """The product with its backward pass. Operands are kept as they are, and rounded again where they are needed again.

    Where the forward's rounding is reused, so are its scales, if they are few.
    """

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
        first, second = forward_operands(setting, setting.product.merges_rows(w.shape))
        dtype = setting.dtype or torch.promote_types(a.dtype, w.dtype)
        held = _carrier(first, a.dtype, second, w.dtype, a.device, setting, dtype)
        seed_of_w = seed if setting.two_inputs else weight_seed
        rounded_a = round_scaled(a, first, seed, setting.stream(False, False), held.dtype, setting.place(False))
        rounded_w = round_scaled(w, second, seed_of_w, setting.stream(True, False), held.dtype, setting.place(True))
        observer = ctx.observer = observers.current()
        if observer is not None:
            _show(observer, a, first, seed, setting, False, False)
            _show(observer, w, second, seed_of_w, setting, True, False)
        # torch says that a parameter needs its gradient under no_grad, too.
        needs_a, needs_w = (recording and needed for needed in ctx.needs_input_grad[:2])
        ctx.setting = setting
        ctx.facts = ((a.shape, a.dtype), (w.shape, w.dtype), None if bias is None else bias.dtype)
        clipped = [beyond(a, first.quantizer) if needs_a else None, beyond(w, second.quantizer) if needs_w else None]
        scales_a = rounded_a.scales if needs_w and setting.is_reused(False) else None
        scales_w = rounded_w.scales if needs_a and setting.is_reused(True) else None
        ctx.save_for_backward(a if needs_w else None, w if needs_a else None, seed, seed_of_w, scales_a, scales_w, *clipped)
        added = bias if setting.draws is None or setting.draws.adds_bias else None
        factors = rounded_a.factors + rounded_w.factors
        return setting.product.forward(rounded_a.values, rounded_w.values, added, dtype, held.exact, factors)

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's own)
        with without_autocast(g.device):
            return _gradients(ctx, g)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    a, w, seed, seed_of_w, scales_a, scales_w, *clipped = ctx.saved_tensors
    setting: Setting = ctx.setting
    (a_shape, a_dtype), (w_shape, w_dtype), bias_dtype = ctx.facts
    product = setting.product
    merges = product.merges_rows(w_shape)
    observer: observers.Observer | None = ctx.observer
    upstream = _Upstream(g, seed, setting, observer)
    gradients: list[Tensor | None] = [None] * 7
    if w is not None:
        of_g, of_w = operands_of_grad_a(setting, merges)
        held = _carrier(of_g, g.dtype, of_w, w_dtype, g.device, setting, a_dtype)
        rounded_w = round_scaled(w, of_w, seed_of_w, setting.stream(True, True), held.dtype, setting.place(True), known=scales_w)
        if observer is not None:
            _show(observer, w, of_w, seed_of_w, setting, True, True)
        rounded_g = upstream.rounded(of_g, False, held.dtype)
        factors = rounded_g.factors + rounded_w.factors
        found = product.grad_a(rounded_g.values, rounded_w.values, a_shape, a_dtype, held.exact, factors)
        gradients[0] = clip(found, clipped[0])
        del rounded_g, rounded_w  # the second product needs the room
    if a is not None:
        of_g, of_a = operands_of_grad_w(setting, merges)
        held = _carrier(of_g, g.dtype, of_a, a_dtype, g.device, setting, w_dtype)
        rounded_a = round_scaled(a, of_a, seed, setting.stream(False, True), held.dtype, setting.place(False), known=scales_a)
        if observer is not None:
            _show(observer, a, of_a, seed, setting, False, True)
        rounded_g = upstream.rounded(of_g, True, held.dtype)
        factors = rounded_g.factors + rounded_a.factors
        found = product.grad_w(rounded_g.values, rounded_a.values, w_shape, w_dtype, held.exact, factors)
        gradients[1] = clip(found, clipped[1])
    if bias_dtype is not None and ctx.needs_input_grad[2]:
        gradients[2] = product.grad_bias(g).to(bias_dtype)
    return tuple(gradients)


def _show(
    observer: observers.Observer, x: Tensor, point: Point, seed: Tensor | None, setting: Setting, second: bool, backward: bool
) -> None:
    """Lets somebody look at an operand that was rounded, unless it is the one that the forward pass rounded."""
    if point.quantizer is not None and not (backward and setting.is_reused(second)):
        name, stream = setting.name(second, backward), setting.stream(second, backward)
        observer.rounds_scaled(name, x, point, seed, stream, setting.place(second))


def _carrier(
    one: Point, one_dtype: torch.dtype, other: Point, other_dtype: torch.dtype, device: torch.device, setting: Setting, dtype: torch.dtype
) -> Carrier:
    """The carrier of two operands. What is multiplied with scales yet must not be rounded to 16 bits before."""
    result = torch.promote_types(dtype, torch.float32) if leaves_factor(one.quantizer) or leaves_factor(other.quantizer) else dtype
    return carrier_of(values_of(one, one_dtype), values_of(other, other_dtype), device, setting.product.narrow_carrier(result))


class _Upstream:
    """The gradient of the result, rounded for the two products: once for both where one rounding serves both."""

    def __init__(self, g: Tensor, seed: Tensor | None, setting: Setting, observer: observers.Observer | None) -> None:
        self._g, self._seed, self._setting, self._observer = g, seed, setting, observer
        self._shared: Rounded | None = None
        grad = setting.points.grad
        directed = grad is not None and (grad.transform is not None or (grad.scale is not None and grad.scale.is_directed))
        self._is_shared = setting.points.grad_w is None and not directed

    def rounded(self, point: Point, second: bool, dtype: torch.dtype) -> Rounded:
        """What the product that gives the gradient of the first or of the second operand takes, in a dtype that holds it."""
        if self._shared is not None:
            return self._shared._replace(values=self._shared.values.to(dtype))
        number = GRAD_W if second and not self._is_shared else GRAD
        stream = self._setting.gradient_stream(number)
        found = round_scaled(self._g, point, self._seed, stream, dtype)
        if self._observer is not None and point.quantizer is not None:
            name = "grad_w" if second and self._setting.points.grad_w is not None else "grad"
            self._observer.rounds_scaled(name, self._g, point, self._seed, stream)
        self._shared = found if self._is_shared else None
        return found
