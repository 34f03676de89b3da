"""Small models whose products torch's own counter counts, for the tests of `qsim.coverage`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import qsim
from qsim import FivePoint, Float, Quantizer
from support.points import in_order

ALL = FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2")
#: Operands of 21 bits: products run in qsim's own operators, which keep all bits of float32.
EXACT = in_order(*[Quantizer(Float(8, 20))] * 5)


class Calls(nn.Module):
    """A module that computes by a function."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


def tied(model: Any, x: Tensor) -> Tensor:
    return F.linear(model.up(model.table(x)).tanh(), model.table.weight)


def attends(model: Any, x: Tensor) -> Tensor:
    q, k, v = model.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return model.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def tokens() -> Tensor:
    return torch.randint(10, (2, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def convolves() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Conv2d(2, 2, 3, stride=2))


def multiplies() -> nn.Module:
    return Calls(lambda own, x: torch.bmm(own.up(x), x.mT), up=nn.Linear(4, 4))


def contracts() -> nn.Module:
    return Calls(lambda own, x: torch.einsum("bij,kj->bik", x, own.up.weight), up=nn.Linear(4, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(3, 4)),
    "mlp of tokens": (mlp, lambda: torch.randn(2, 3, 4)),
    "convolutions": (convolves, lambda: torch.randn(2, 3, 6, 5)),
    "attention": (lambda: Calls(attends, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)), lambda: torch.randn(2, 5, 8)),
    "tied head": (lambda: Calls(tied, table=nn.Embedding(10, 4), up=nn.Linear(4, 4)), tokens),
    "bmm": (multiplies, lambda: torch.randn(2, 3, 4)),
    "einsum": (contracts, lambda: torch.randn(2, 3, 4)),
}


def made(name: str, points: FivePoint | None = None) -> tuple[nn.Module, Tensor]:
    """A model with points, and an input that requires a gradient if it can."""
    torch.manual_seed(0)
    model, inputs = (make() for make in MODELS[name])
    assert isinstance(model, nn.Module)
    assert isinstance(inputs, Tensor)
    if points is not None:
        qsim.convert(model, points)
    return model, inputs.requires_grad_() if inputs.is_floating_point() else inputs


def counted_by_torch(model: nn.Module, x: Tensor, backward: bool = True) -> int:
    with FlopCounterMode(display=False) as counter:
        result = model(x)
        if backward:
            result.sum().backward()
    return counter.get_total_flops() // 2
