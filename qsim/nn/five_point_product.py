"""Algorithms 1 and 2 of *Training with Fewer Bits*: a product whose operands and gradients are rounded at five points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qsim import random
from qsim.five_point import FivePoint
from qsim.nn.carriers import carrier
from qsim.nn.products import Product
from qsim.quantizer import Quantizer
from qsim.rounding import DEFAULT_BITS

# Streams of the points, so that none rounds with another's random bits; those of weights are shared by all ranks.
_ACT, _ACT_BWD, _GRAD, _GRAD_W = (random.stream("five points", name) for name in ("act", "act_bwd", "grad", "grad_w"))
_WEIGHT, _WEIGHT_BWD = (random.stream("five points", name) for name in ("weight", "weight_bwd"))
_SECOND = random.stream("five points", "second operand")

#: Formats of at most this many bits are kept for the backward pass as codes.
CODE_BITS = 8


@dataclass(frozen=True)
class Setting:
    """What a product is besides its tensors.

    Attributes:
        points: Where it rounds.
        product: The operation.
        two_inputs: Whether the second operand is an input too, and rounds as the first does, instead of a weight.
    """

    points: FivePoint
    product: Product
    two_inputs: bool = False

    def forward_point(self, second: bool) -> Quantizer | None:
        """What rounds an operand forward."""
        return self.points.weight if second and not self.two_inputs else self.points.act

    def backward_point(self, second: bool) -> Quantizer | None:
        """What rounds an operand for the backward pass."""
        point = self.points.weight_bwd if second and not self.two_inputs else self.points.act_bwd
        return self.forward_point(second) if isinstance(point, str) else point

    def is_reused(self, second: bool) -> bool:
        """Whether the backward pass takes the forward's rounded tensor."""
        return (self.points.weight_bwd if second and not self.two_inputs else self.points.act_bwd) == "same"

    def stream(self, second: bool, backward: bool) -> int:
        """The stream of random bits that an operand is rounded with."""
        backward = backward and not self.is_reused(second)
        if second and not self.two_inputs:
            return _WEIGHT_BWD if backward else _WEIGHT
        own = random.rank_stream(_ACT_BWD if backward else _ACT)
        return own ^ _SECOND if second else own


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
    return FivePointProduct.apply(a, w, bias, seed, weight_seed, setting, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]


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
        rounded_a, kept_a = _round_and_keep(a, seed, setting, False, held, needs_w)
        rounded_w, kept_w = _round_and_keep(w, seed if setting.two_inputs else weight_seed, setting, True, held, needs_a)
        ctx.setting = setting
        ctx.facts = ((a.shape, a.dtype), (w.shape, w.dtype), None if bias is None else bias.dtype)
        clipped = [_beyond(a, first) if needs_a else None, _beyond(w, second) if needs_w else None]
        ctx.save_for_backward(kept_a, kept_w, seed, weight_seed, *clipped)
        return setting.product.forward(rounded_a, rounded_w, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's own)
        kept_a, kept_w, seed, weight_seed, *clipped = ctx.saved_tensors
        setting: Setting = ctx.setting
        (a_shape, a_dtype), (w_shape, w_dtype), bias_dtype = ctx.facts
        points, product = setting.points, setting.product
        gradients: list[Tensor | None] = [None] * 7
        rounded_g = None
        if kept_w is not None:
            held = carrier((points.grad, g.dtype), (setting.backward_point(True), w_dtype), g.device)
            rounded_g = _round(g, points.grad, seed, random.rank_stream(_GRAD), held)
            w = _recall(kept_w, seed if setting.two_inputs else weight_seed, setting, True, held)
            gradients[0] = _clip(product.grad_a(rounded_g, w, a_shape, a_dtype), clipped[0])
        if kept_a is not None:
            point = points.grad_w or points.grad
            held = carrier((point, g.dtype), (setting.backward_point(False), a_dtype), g.device)
            if rounded_g is None or points.grad_w is not None:
                rounded_g = _round(g, point, seed, random.rank_stream(_GRAD_W if points.grad_w else _GRAD), held)
            a = _recall(kept_a, seed, setting, False, held)
            gradients[1] = _clip(product.grad_w(rounded_g.to(held), a, w_shape, w_dtype), clipped[1])
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            gradients[2] = product.grad_bias(g).to(bias_dtype)
        return tuple(gradients)


def _round(x: Tensor, point: Quantizer | None, seed: Tensor | None, stream: int, dtype: torch.dtype) -> Tensor:
    """What a point makes of a tensor, in the carrier."""
    if point is None:
        return x.to(dtype)
    grid, _ = point.format.spelling
    chosen = seed if point.rounding.is_stochastic else None
    return torch.ops.qsim.quantize.default(x, chosen, grid, _rule(point, x.dtype), stream, 0, dtype)  # type: ignore[no-any-return]


def _rule(point: Quantizer, dtype: torch.dtype) -> str:
    return point.rounding.spelling[point.overflow, DEFAULT_BITS[8 * dtype.itemsize]]


def _round_and_keep(
    x: Tensor, seed: Tensor | None, setting: Setting, second: bool, dtype: torch.dtype, needed: bool
) -> tuple[Tensor, Tensor | None]:
    """An operand rounded for the forward product, and what the backward pass needs of it: codes if they are narrow, else itself."""
    point, backward_point = setting.forward_point(second), setting.backward_point(second)
    stream = setting.stream(second, False)
    is_weight = second and not setting.two_inputs
    if not needed or is_weight or backward_point is None or backward_point.format.bits > CODE_BITS:
        return _round(x, point, seed, stream, dtype), x if needed else None
    grid, coding = backward_point.format.spelling
    rule, backward_stream = _rule(backward_point, x.dtype), setting.stream(second, True)
    if point is None:
        chosen = seed if backward_point.rounding.is_stochastic else None
        return x.to(dtype), torch.ops.qsim.encode.default(x, chosen, grid, rule, coding, backward_stream, 0, False)
    chosen = seed if point.rounding.is_stochastic or backward_point.rounding.is_stochastic else None
    forward = (point.format.spelling[0], _rule(point, x.dtype), stream, dtype)
    return torch.ops.qsim.quantize_and_encode.default(x, chosen, *forward, grid, rule, coding, backward_stream)  # type: ignore[no-any-return]


def _recall(kept: Tensor, seed: Tensor | None, setting: Setting, second: bool, dtype: torch.dtype) -> Tensor:
    """An operand for the backward pass, rounded, in the carrier."""
    point = setting.backward_point(second)
    if point is not None and not kept.is_floating_point():
        return torch.ops.qsim.decode.default(kept, *point.format.spelling, dtype)  # type: ignore[no-any-return]
    return _round(kept, point, seed, setting.stream(second, True), dtype)


def _beyond(x: Tensor, point: Quantizer | None) -> Tensor | None:
    """Where a point that clips gradients saturates."""
    if point is None or not point.clip_gradient:
        return None
    return (x < point.format.min) | (x > point.format.max)


def _clip(gradient: Tensor, beyond: Tensor | None) -> Tensor:
    return gradient if beyond is None else gradient.masked_fill_(beyond, 0.0)
