"""`qsim.coverage` works wherever training works: every named recipe, in every kind of layer and of product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim

ENDS = torch.tensor([5, 5, 20], dtype=torch.int32)


class Stack(nn.Module):
    """A matrix for each expert, and how inputs are multiplied by them."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.multiply, self.stack = multiply, nn.Parameter(torch.randn(3, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.stack)


class Attention(nn.Module):
    """Attention of a tensor to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Hidden(nn.Module):
    """The outputs of a recurrent module, without its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]  # type: ignore[no-any-return]


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape).requires_grad_()


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(16, 32), normal(20, 16)),
    "linear of tokens": (lambda: nn.Linear(16, 32), normal(2, 5, 16)),
    "convolution": (lambda: nn.Conv2d(16, 8, 3), normal(2, 16, 6, 6)),
    "grouped convolution": (lambda: nn.Conv1d(16, 16, 3, groups=2), normal(2, 16, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(16, 8, 2), normal(2, 16, 4, 4)),
    "tied embedding": (lambda: nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 16)), lambda: torch.randint(9, (2, 5))),
    "recurrent": (Hidden, normal(2, 3, 16)),
    "attention": (Attention, normal(2, 5, 16)),
    "batch": (lambda: Stack(torch.bmm), normal(3, 7, 16)),
    "experts": (lambda: Stack(lambda x, w: torch._grouped_mm(x, w, offs=ENDS)), normal(20, 16)),
    "experts of equal size": (lambda: Stack(torch._grouped_mm), normal(3, 7, 16)),
    "experts as layers": (lambda: Stack(lambda x, w: F.linear(x, w[1].mT)), normal(20, 16)),
}


def message(call: Callable[[], Any]) -> str:
    """The message of the error that a call raises, if it does."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_recipe_is_covered_where_it_trains(kind: str) -> None:
    make, inputs = KINDS[kind]
    trained = []
    for name in qsim.recipes.NAMED:
        points = qsim.recipes.resolve(name, "e4m3").points
        model, x = make(), inputs()
        if message(lambda model=model, points=points: qsim.convert(model, points, calls="all")):
            continue
        refused = message(lambda model=model, x=x: model(x).sum().backward())
        found: list[qsim.Coverage] = []
        assert message(lambda model=model, x=x, found=found: found.append(qsim.coverage(model, x))) == refused, name
        if not refused:
            trained.append(name)
            assert sum(each.multiply_adds for each in found[0].products if each.points) > 0, name
    assert {"four_over_six", "te_nvfp4", "quartet2", "ms_eden", "tetrajet2", "nvfp4"} <= set(trained) or kind == "grouped convolution"
