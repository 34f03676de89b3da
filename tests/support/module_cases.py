"""Equally constructed modules of torch.nn and qsim.nn, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn.modules import FivePointModule
from support.points import in_order

Shape = tuple[int, ...]

NEAREST = FivePoint(act="e4m3", weight="e4m3", act_bwd="e4m3", weight_bwd="same", grad="e5m2")
NOISY = in_order(*[Quantizer(fmt, "stochastic") for fmt in ("e4m3", "e4m3", "e4m1", "e4m1", "e5m2")])


@dataclass(frozen=True)
class ModuleCase:
    """A module, its arguments and an input.

    Attributes:
        name: Its class in torch.nn and in qsim.nn.
        arguments: Its positional arguments.
        shape: The shape of the input.
        options: Its keyword arguments.
        call: Additional arguments of its call.
    """

    name: str
    arguments: tuple[Any, ...]
    shape: Shape
    options: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def torchs(self) -> nn.Module:
        """Torch's own module, with some weights."""
        torch.manual_seed(3)
        return getattr(nn, self.name)(*self.arguments, **self.options)  # type: ignore[no-any-return]

    def own(self, points: FivePoint | None) -> FivePointModule:
        """The one with points, with the same weights."""
        torch.manual_seed(3)
        own = None if points is None else getattr(qsim.nn, self.name).own_points(points)
        return getattr(qsim.nn, self.name)(*self.arguments, **self.options, points=own)  # type: ignore[no-any-return]

    def input(self) -> Tensor:
        """An input."""
        if self.name == "Embedding":
            return torch.randint(self.arguments[0], self.shape, generator=torch.Generator().manual_seed(1))
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def run(self, module: nn.Module) -> list[Tensor]:
        """A module's output, and the gradients of its input and its parameters; with the same noise whatever was drawn before."""
        x = self.input()
        torch.manual_seed(7)
        value = module(x, **self.call)
        upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(2)).to(value)
        leaves = [*module.parameters(), *([x] if x.requires_grad else [])]
        return [value.detach(), *torch.autograd.grad(value, leaves, upstream)]

    def __str__(self) -> str:
        return f"{self.name} {' '.join(f'{name}={value}' for name, value in {**self.options, **self.call}.items())}".strip()


MODES = ("zeros", "reflect", "replicate", "circular")
LINEAR = [ModuleCase("Linear", (5, 3), (2, 4, 5)), ModuleCase("Linear", (5, 3), (5,), {"bias": False})]
CONV = [ModuleCase("Conv1d", (4, 6, 3), (2, 4, 9), {"padding": 2, "padding_mode": mode, "stride": 2}) for mode in MODES]
CONV += [ModuleCase("Conv2d", (4, 6, (2, 3)), (4, 7, 6), {"padding": "same", "padding_mode": mode, "dilation": (1, 2)}) for mode in MODES]
CONV += [
    ModuleCase("Conv3d", (2, 4, (1, 2, 3)), (2, 2, 4, 5, 4), {"padding": (0, 1, 1), "padding_mode": mode, "groups": 2}) for mode in MODES
]
CONV += [
    ModuleCase("Conv2d", (4, 6, 3), (2, 4, 7, 6), {"bias": False, "padding": "valid"}),
    ModuleCase("Conv1d", (4, 6, 4), (4, 9), {"padding": "same"}),
]
TRANSPOSED = [
    ModuleCase("ConvTranspose1d", (4, 6, 3), (2, 4, 5), {"stride": 3, "padding": 1}, {"output_size": [15]}),
    ModuleCase("ConvTranspose2d", (4, 6, 3), (2, 4, 5, 4), {"stride": 2, "output_padding": 1, "groups": 2}),
    ModuleCase("ConvTranspose2d", (4, 6, (3, 2)), (4, 5, 4), {"stride": 2, "bias": False}, {"output_size": [12, 9]}),
    ModuleCase("ConvTranspose3d", (2, 4, 2), (2, 2, 3, 3, 2), {"stride": (2, 1, 2), "dilation": 2}, {"output_size": [8, 5, 6]}),
]
EMBEDDING = [
    ModuleCase("Embedding", (7, 4), (3, 5), {"padding_idx": 2}),
    ModuleCase("Embedding", (7, 4), (6,), {"padding_idx": -1, "scale_grad_by_freq": True}),
]
CASES = LINEAR + CONV + TRANSPOSED + EMBEDDING
FEW = [LINEAR[0], CONV[1], CONV[4], TRANSPOSED[0], EMBEDDING[0]]
cases = pytest.mark.parametrize("case", CASES, ids=str)
few = pytest.mark.parametrize("case", FEW, ids=str)
