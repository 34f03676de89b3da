"""`gradient_error` and `batch_for` on modules that multiply by parameters of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.diagnostics import batch_for, gradient_error
from qsim.nn.calls.settings import call_points
from qsim.studies.learners.mixture import Mixture

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

NOISY = qsim.Quantizer("e4m1", "stochastic")
DELAYED = qsim.Quantizer("e4m3", scale=qsim.scaling.Delayed(4))


class OwnProduct(nn.Module):
    """A linear layer written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches() -> list[Tensor]:
    return list(torch.randn(4, 16, 8))


def both_ways(points: Any) -> tuple[nn.Module, nn.Module]:
    """The same layer as a module of its own, and as torch's."""
    by_hand, layer = nn.Sequential(OwnProduct()), nn.Sequential(nn.Linear(8, 4, bias=False))
    with torch.no_grad():
        layer[0].weight.copy_(by_hand[0].matrix.T)
    return qsim.convert(by_hand, points), qsim.convert(layer, points)


@pytest.mark.parametrize("point", ["act", "weight", "act_bwd", "weight_bwd", "grad", "all"])
def test_errors_are_those_of_a_layer(point: str) -> None:
    points = qsim.FivePoint(act="e4m1", weight="e4m2", act_bwd="same", weight_bwd="same", grad="e5m1")
    given = batches()
    by_hand, layer = (gradient_error(model, loss, given, draws=2).of(point) for model in both_ways(points))
    for name in ("bias", "sampling", "gradient"):
        assert getattr(by_hand, name).value == pytest.approx(getattr(layer, name).value, rel=1e-4, abs=1e-6)


def test_delayed_scales() -> None:
    points = qsim.FivePoint(act=DELAYED, weight=DELAYED, act_bwd="same", weight_bwd="same", grad=DELAYED)
    models, given = both_ways(points), batches()
    for model in models:
        loss(model, given[0]).backward()
    by_hand, layer = (gradient_error(model, loss, given, draws=2) for model in models)
    for point in ("act_bwd", "grad", "all"):
        assert by_hand.of(point).bias.value == pytest.approx(layer.of(point).bias.value, rel=1e-4, abs=1e-12)
        assert by_hand.of(point).bias.value > 0


def test_each_draw_rounds_the_weights_of_experts_again() -> None:
    torch.manual_seed(0)
    experts = Mixture(16, experts=3, active=2)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    model = qsim.convert(experts, qsim.FivePoint(weight=NOISY, weight_bwd="same", act_bwd=NOISY), exclude="router")
    before = call_points(model)
    found = gradient_error(model, loss, list(torch.randn(4, 16, 16)), draws=3)
    assert call_points(model) is before
    assert {error.layer for error in found} == {"(the model)", "all weights"}
    assert found.of("none").rounding.value == 0
    assert found.of("weight").rounding.low > 0
    assert found.of("act_bwd").rounding.low > 0


def test_a_batch_makes_up_for_noise_in_a_product() -> None:
    by_hand, layer = both_ways("mxfp8")
    given, points = list(torch.randn(32, 16, 8)), qsim.FivePoint(act_bwd=qsim.Quantizer("e5m0", "stochastic"))
    own, of_layer = (batch_for(model, loss, given, points).factor for model in (by_hand, layer))
    assert own.low > 1
    assert own.value == pytest.approx(of_layer.value, rel=0.2)
