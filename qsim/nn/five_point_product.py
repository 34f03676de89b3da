"""Algorithms 1 and 2 of *Training with Fewer Bits*: a product whose operands and gradients are rounded at five points."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qsim import random
from qsim.nn.carriers import carrier
from qsim.nn.operands import GRAD, GRAD_W, Setting, beyond, clip, recall, round_and_keep, round_to_carrier


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
    with without_autocast(a.device):
        return FivePointProduct.apply(a, w, bias, seed, weight_seed, setting, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Leaves operands in their carrier: autocast would make 16 bits of them."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


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
        held = carrier((first, a.dtype), (second, w.dtype), a.device)
        dtype = torch.promote_types(a.dtype, w.dtype)
        # torch says that a parameter needs its gradient under no_grad, too.
        needs_a, needs_w = (recording and needed for needed in ctx.needs_input_grad[:2])
        rounded_a, kept_a = round_and_keep(a, seed, setting, False, held, needs_w)
        rounded_w, kept_w = round_and_keep(w, seed if setting.two_inputs else weight_seed, setting, True, held, needs_a)
        ctx.setting = setting
        ctx.facts = ((a.shape, a.dtype), (w.shape, w.dtype), None if bias is None else bias.dtype)
        clipped = [beyond(a, first) if needs_a else None, beyond(w, second) if needs_w else None]
        ctx.save_for_backward(kept_a, kept_w, seed, weight_seed, *clipped)
        return setting.product.forward(rounded_a, rounded_w, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's own)
        with without_autocast(g.device):
            return _gradients(ctx, g)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    kept_a, kept_w, seed, weight_seed, *clipped = ctx.saved_tensors
    setting: Setting = ctx.setting
    (a_shape, a_dtype), (w_shape, w_dtype), bias_dtype = ctx.facts
    points, product = setting.points, setting.product
    gradients: list[Tensor | None] = [None] * 7
    rounded_g = None
    if kept_w is not None:
        held = carrier((points.grad, g.dtype), (setting.backward_point(True), w_dtype), g.device)
        rounded_g = round_to_carrier(g, points.grad, seed, random.rank_stream(GRAD), held)
        w = recall(kept_w, seed if setting.two_inputs else weight_seed, setting, True, held)
        gradients[0] = clip(product.grad_a(rounded_g, w, a_shape, a_dtype), clipped[0])
    if kept_a is not None:
        point = points.grad_w or points.grad
        held = carrier((point, g.dtype), (setting.backward_point(False), a_dtype), g.device)
        if rounded_g is None or points.grad_w is not None:
            rounded_g = round_to_carrier(g, point, seed, random.rank_stream(GRAD_W if points.grad_w else GRAD), held)
        a = recall(kept_a, seed, setting, False, held)
        gradients[1] = clip(product.grad_w(rounded_g.to(held), a, w_shape, w_dtype), clipped[1])
    if bias_dtype is not None and ctx.needs_input_grad[2]:
        gradients[2] = product.grad_bias(g).to(bias_dtype)
    return tuple(gradients)
