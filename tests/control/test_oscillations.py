"""OsciReset compared with its definition written out; windows, resumption, errors."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.control import OsciReset
from qsim.control.oscillations import rounded_weight
from support.refusing import refused


def net(points: Any = "tetrajet2") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 3))
    return qsim.convert(model, qsim.FivePoint(points, points) if points == "e4m3" else points)


def walk(model: nn.Module, number: int) -> None:
    """A step of an optimizer: small moves back and forth, and a drift."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for layer in (module for module in model if isinstance(module, nn.Linear)):
            p = layer.weight
            p += 0.02 * torch.randn(p.shape, generator=generator) * (-1) ** number + 1e-4


def by_definition(weights: list[Tensor], round_: Any, ratio: float) -> tuple[Tensor, Tensor]:
    """Where the rounded path is so many times as long as the weight's own, and what the last weight is rounded to."""
    weights = [w.double() for w in weights]
    rounded = [round_(w.float()).double() for w in weights]
    moved = sum((b - a).abs() for a, b in pairwise(weights))
    jumped = sum((b - a).abs() for a, b in pairwise(rounded))
    return jumped / moved >= ratio, rounded[-1].float()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("points", ["tetrajet2", "nvfp4.with_(last=0)", "lsq.with_(first=0, last=0)", "e4m3"])
def test_it_resets_what_its_definition_resets(points: Any) -> None:
    model = net(points)
    control = OsciReset(period=7, window=4, ratio=2.0, first=2).start(model)
    layer: Any = model[0]
    path: list[Tensor] = []
    resets = 0
    for number in range(1, 21):
        walk(model, number)
        before = layer.weight.detach().clone()
        control.step()
        place = (number - 2) % 7
        if number >= 2 and place == 0:
            path = []
        path.append(before)
        if number >= 2 and place == 4:
            oscillates, rounded = by_definition(path, lambda w: _rounded_as(layer, w), 2.0)
            assert torch.equal(layer.weight, torch.where(oscillates, rounded, before))
            assert control.counts["0"] == int(oscillates.sum())
            resets += control.counts["0"]
        else:
            assert torch.equal(layer.weight, before)
    assert resets


def _rounded_as(layer: nn.Module, weight: Tensor) -> Tensor:
    """Round another weight as a layer does, and compare with a product with the identity."""
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.copy_(weight)  # type: ignore[union-attr, operator]
        found = rounded_weight(other)  # type: ignore[arg-type]
        point = other.points.weight
        eye = torch.eye(weight.shape[1])
        product = qsim.nn.functional.linear(eye, other.weight, points=qsim.FivePoint(weight=point)).T  # type: ignore[arg-type]
        torch.testing.assert_close(found, product, rtol=1e-6, atol=0.0)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stop", [3, 5, 6, 9])
def test_a_resumed_run_resets_the_same(stop: int) -> None:
    whole, part = net(), net()
    control, first = (OsciReset(period=6, window=4, ratio=2.0, first=1).start(model) for model in (whole, part))
    for number in range(1, 13):
        walk(whole, number)
        control.step()
    for number in range(1, stop + 1):
        walk(part, number)
        first.step()
    again = OsciReset(period=6, window=4, ratio=2.0, first=1)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    again.start(part)
    for number in range(stop + 1, 13):
        walk(part, number)
        again.step()
    assert all(map(torch.equal, whole.parameters(), part.parameters()))
    assert again.steps == 12


def test_errors() -> None:
    stochastic = net(qsim.FivePoint(weight=qsim.Quantizer("e2m1", "stochastic", scale="tensor")))
    delayed, plain = net(qsim.recipes.fp8_hybrid(qsim.scaling.Delayed(4))), nn.Linear(2, 2)
    with refused(ValueError, "OsciReset: 0: its weight is rounded stochastically, so that every value jumps"):
        OsciReset().start(stochastic)
    with refused(ValueError, "OsciReset: 0: its weight has a delayed scale"):
        OsciReset().start(delayed)
    with refused(ValueError, "the model has no linear layer with rounded weights: convert it first, with qsim.convert"):
        OsciReset().start(plain)
    with refused(TypeError, "OsciReset: start takes a torch.nn.Module, got Parameter"):
        OsciReset().start(plain.weight)  # type: ignore[arg-type]
    with refused(RuntimeError, "OsciReset: start it first, with control.start(model)"):
        OsciReset().step()
    with refused(ValueError, "a state has steps and layers, got step"):
        OsciReset().load_state_dict({"step": 1})
    control = OsciReset()
    control.load_state_dict({"steps": 1, "layers": {"7": {}}})
    with refused(ValueError, "OsciReset: the state has a layer '7', and the model has 0, 2"):
        control.start(delayed)
    with refused(ValueError, "window"):
        OsciReset(period=10, window=20)
    with refused(ValueError, "ratio must be greater than 1", "0.5"):
        OsciReset(ratio=0.5)


@pytest.mark.parametrize(("ratio", "resets"), [(2.0, True), (2.001, False)])
def test_an_element_exactly_at_the_ratio_is_reset(ratio: float, resets: bool) -> None:
    """A weight moves by 1/16 over the middle between two numbers of E4M3, which are 1/8 apart: twice as far, without rounding errors."""
    model: Any = qsim.convert(nn.Sequential(nn.Linear(4, 4)), qsim.FivePoint("e4m3", "e4m3"))
    nn.init.constant_(model[0].weight, 1 + 1 / 32)
    control = OsciReset(period=2, window=1, ratio=ratio).start(model)
    nn.init.constant_(model[0].weight, 1 + 3 / 32)
    control.step()
    assert control.counts["0"] == (16 if resets else 0)
    assert torch.equal(model[0].weight.detach(), torch.full((4, 4), 1.125 if resets else 1 + 3 / 32))
