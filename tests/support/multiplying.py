"""A module that multiplies by its parameters in functions of torch, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint
from qsim.nn import functional

NEAREST = FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2")


class Calls(nn.Module):
    """A module that multiplies by a function of itself and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.stack = nn.Parameter(torch.randn(3, 4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("fixed", torch.randn(4, 4))
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def made(function: Callable[[Any, Tensor], Tensor], points: Any = NEAREST, **parts: nn.Module) -> Any:
    torch.manual_seed(0)
    return qsim.convert(Calls(function, **parts), points)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*(shape or (5, 4)), generator=torch.Generator().manual_seed(1)).requires_grad_()


def results(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """A result, and the gradients of the input and of all parameters that it depends on."""
    torch.manual_seed(2)
    y = call(x)
    found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()], allow_unused=True)
    return [y.detach(), *(gradient for gradient in found if gradient is not None)]


def rounded(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, w, bias, NEAREST)
