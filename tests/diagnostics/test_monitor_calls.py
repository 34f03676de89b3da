"""Monitors of products outside of layers, by the names of their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint
from qsim.diagnostics import Monitor
from support.comparing import same_bits

POINTS = FivePoint(act="e4m3", weight="e3m2", act_bwd="same", weight_bwd="same", grad="e5m2")


class Model(nn.Module):
    """A product with a parameter, one with the table of an embedding, one of two activations, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 8)
        self.w = nn.Parameter(torch.randn(8, 8))
        self.unused = nn.Parameter(torch.randn(3, 3))
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(F.linear(self.table(ids), self.w))
        return F.linear(x @ x.mT @ x, self.table.weight)


def watched(model: nn.Module, ids: Tensor) -> tuple[Monitor, Tensor]:
    with Monitor(model, every=2) as monitor:
        for _ in range(3):  # the second step is not watched
            model.zero_grad()
            y = model(ids)
            y.square().sum().backward()
            monitor.step()
    return monitor, y


def test_products_are_counted_under_the_names_of_their_parameters() -> None:
    model: Any = qsim.convert(Model(), POINTS, calls="all")
    ids = torch.arange(6).view(2, 3)
    monitor, y = watched(model, ids)
    assert same_bits(y, model(ids))
    sample = monitor.samples[1]
    both = {("", point) for point in ("act", "grad")}
    single = {(name, point) for name in ("w", "table.weight", "layer") for point in ("act", "weight", "grad")}
    assert {(counts.layer, counts.point) for counts in sample} == both | single
    for name, weight in (("w", model.w), ("table.weight", model.table.weight), ("layer", model.layer.weight)):
        exact = (qsim.quantize(weight.detach(), "e3m2") == weight).float().mean()
        assert sample[name, "weight"].shares["exact"] == pytest.approx(float(exact))
    # The operands of x @ xᵀ, and of the result and x.
    assert sample["", "act"].elements == 2 * (3 * 8 * 3 + 3 * 3)
    assert "never" not in monitor.table()


def test_products_with_a_layers_weight_are_the_layers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.layer.weight)

    model = qsim.convert(Tied(), POINTS)
    monitor, _ = watched(model, torch.randn(2, 4))
    assert [(counts.layer, counts.point) for counts in monitor.samples[0]] == [("layer", name) for name in ("act", "weight", "grad")]
