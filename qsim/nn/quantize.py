"""A module that rounds what passes through it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qsim import random
from qsim.formats.dtypes import FLOATS
from qsim.nn.carriers import can_hold
from qsim.nn.once import once
from qsim.nn.operands import round_to_carrier
from qsim.quantizer import Point, Quantizer, short


class Quantize(nn.Module):
    """Rounds what passes through it: values on the way forward, gradients on the way back.

    Args:
        forward: What rounds values: a `Quantizer`, anything that `qsim.format` takes, or `None`.
        backward: The same for gradients.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.Quantize(forward="e2m1", backward="e4m3")
        >>> x = torch.tensor([1.2, 2.6], requires_grad=True)
        >>> layer(x).backward(torch.tensor([0.3, 0.1]))
        >>> x.grad
        tensor([0.3125, 0.1016])
    """

    def __init__(self, forward: Point = None, backward: Point = None) -> None:
        super().__init__()
        self.forward_point = forward if forward is None or isinstance(forward, Quantizer) else Quantizer(forward)
        self.backward_point = backward if backward is None or isinstance(backward, Quantizer) else Quantizer(backward)

    def forward(self, input: Tensor) -> Tensor:
        """The rounded input."""
        result = input if self.forward_point is None else self.forward_point(input, stream=random.rank_stream(_FORWARD))
        if self.backward_point is None:
            return result
        if result.dtype not in FLOATS:
            raise TypeError(f"Quantize: input must be float32, bfloat16, float16 or float64, got {result.dtype}")
        if not can_hold(result.dtype, self.backward_point, result.dtype):
            raise ValueError(f"Quantize: gradients are {result.dtype}, which cannot hold every value of {self.backward_point.format!r}")
        stochastic = self.backward_point.rounding.is_stochastic
        seed = random.seed_tensor(None, None, input.device) if stochastic else None
        return _RoundGradient.apply(result, seed, self.backward_point)  # type: ignore[no-any-return,no-untyped-call]

    def extra_repr(self) -> str:
        """The two points."""
        points = {"forward": self.forward_point, "backward": self.backward_point}
        return ", ".join(f"{name}={short(point)}" for name, point in points.items() if point is not None)


_FORWARD, _BACKWARD = (random.stream("quantize", name) for name in ("forward", "backward"))


class _RoundGradient(torch.autograd.Function):
    """The identity, whose gradient is rounded."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, seed: Tensor | None, point: Quantizer) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, Quantizer], output: Tensor) -> None:
        _, seed, ctx.point = inputs
        ctx.save_for_backward(seed)

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (seed,) = ctx.saved_tensors
        return round_to_carrier(g, ctx.point, seed, random.rank_stream(_BACKWARD), g.dtype), None, None
