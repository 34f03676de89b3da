"""Fallback: which layers switch and when, resumption, errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qsim
from qsim.control import Fallback
from support.refusing import refused

FOUR = qsim.FivePoint("e2m1", "mxfp4", "mxfp4")


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    # The second layer's inputs are not small, whatever the first one's are.
    nn.init.constant_(model[0].bias, 3.0)
    return qsim.convert(model, FOUR)


def train(model: nn.Module, control: Fallback, small_from: int, steps: int) -> None:
    """Steps without updates, whose inputs are small from one of them on, so that they underflow in the first layer."""
    for _ in range(steps):
        x = torch.randn(8, 32) * (0.01 if control.steps >= small_from else 4.0)
        model(x).square().sum().backward()
        control.step()


def test_a_layer_that_underflows_is_switched_when_it_is_measured() -> None:
    model, control = net(), Fallback("mxfp8", underflow=0.9, every=3)
    control.start(model)
    with pytest.warns(UserWarning, match=r"Fallback: step 4: 0: act: 100 % underflowed, more than 90 %\. It has wider points"):
        train(model, control, small_from=2, steps=7)
    assert [(switch.step, switch.layer) for switch in control.switches] == [(4, "0")]
    assert model[0].points == qsim.recipes.mxfp8().points
    assert model[2].points == FOUR
    # Switched layers are not measured again, and a monitor is not left behind.
    with qsim.diagnostics.Monitor(model) as monitor:
        model(torch.randn(8, 32))
        monitor.step()
    assert len(monitor.samples) == 1


def test_a_layer_with_large_errors_is_switched() -> None:
    model = net()
    control = Fallback(None, sqnr=30.0).start(model)
    with pytest.warns(UserWarning, match=r"dB, less than 30 dB"):
        train(model, control, small_from=9, steps=1)
    assert {switch.layer for switch in control.switches} == {"0", "2"}
    assert model[0].points.is_identity


def test_a_resumed_run_has_the_same_layers() -> None:
    model, control = net(), Fallback("mxfp8", underflow=0.9, every=2)
    control.start(model)
    with pytest.warns(UserWarning, match="Fallback"):
        train(model, control, small_from=0, steps=3)
    again, resumed = net(), Fallback("mxfp8", underflow=0.9, every=2)
    resumed.load_state_dict(copy.deepcopy(control.state_dict()))
    resumed.start(again)
    assert resumed.switches == control.switches
    assert [layer.points for layer in again[::2]] == [layer.points for layer in model[::2]]  # type: ignore[index]


def test_errors() -> None:
    with refused(ValueError, "Fallback: give a bound, sqnr= in decibels or underflow= as a share"):
        Fallback("mxfp8")
    with refused(ValueError, "underflow must be greater than 0 and less than 1", "2"):
        Fallback("mxfp8", underflow=2)
