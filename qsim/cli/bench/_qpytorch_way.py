"""A linear layer written with QPyTorch: float32 tensors, its kernels at all five points, float32 products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsim import FivePoint, Quantizer
from qsim.formats import Float
from qsim.rounding import NEAREST

Round = Callable[..., Tensor]


class QPyTorchLinear(nn.Linear):
    """The layer.

    Args:
        layer: The layer whose parameters it copies as float32.
        points: Its points, in formats with the usual bias.
        float_quantize: QPyTorch's function.
    """

    def __init__(self, layer: nn.Linear, points: FivePoint, float_quantize: Round) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device=layer.weight.device)
        self.load_state_dict(layer.state_dict())
        self.roundings = tuple(
            _rounding(getattr(points, name), float_quantize) for name in ("act", "weight", "act_bwd", "weight_bwd", "grad")
        )

    def forward(self, input: Tensor) -> Tensor:
        """The rounded product."""
        return _QPyTorchProduct.apply(input, self.weight, self.bias, self.roundings)  # type: ignore[no-any-return,no-untyped-call]


def _rounding(point: Quantizer | str | None, float_quantize: Round) -> Callable[[Tensor], Tensor]:
    if isinstance(point, Quantizer) and isinstance(point.format, Float):
        name = "stochastic" if point.rounding.is_stochastic else "nearest" if point.rounding == NEAREST else ""
        if name:
            fmt = point.format
            return lambda x: float_quantize(x, fmt.exponent, fmt.mantissa, name)
    raise ValueError(f"QPyTorch rounds to floating-point formats, nearest or stochastically: it does not support {point!r}")


class _QPyTorchProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, bias: Tensor | None, roundings: Any) -> Tensor:
        act, weight, *ctx.roundings = roundings
        ctx.save_for_backward(a, w)
        return F.linear(act(a), weight(w), bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, w = ctx.saved_tensors
        act, weight, grad = ctx.roundings
        rounded = grad(g.contiguous())
        rows = rounded.flatten(0, -2)
        total = g.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return rounded @ weight(w), rows.t() @ act(a).flatten(0, -2), total, None
