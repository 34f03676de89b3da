"""Tests that measuring gradients leaves no trace in the model, its gradients or torch's generators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qsim
from qsim.diagnostics import assign, batch_for, gradient_error
from qsim.nn.histories import histories_of
from qsim.nn.modules import FivePointModule

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

DELAYED = qsim.Quantizer("e4m3", "stochastic", scale=qsim.scaling.Delayed(4))
POINTS = qsim.FivePoint(act=DELAYED, weight="e4m3", act_bwd="same", weight_bwd="same", grad=DELAYED)
PLAIN = qsim.FivePoint(act_bwd=qsim.Quantizer("e4m2", "stochastic"))
MEASURES: dict[str, Callable[..., Any]] = {
    "gradient_error": lambda *given, **how: gradient_error(*given, draws=2, **how),
    "batch_for": lambda *given, **how: batch_for(*given, POINTS, PLAIN, 2, **how),
    "assign": lambda model, loss, batches, **how: assign(model, batches, loss, budget=8.0, candidates=["e4m3", "bf16"], probes=1, **how),
}


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().mean()


def trained() -> tuple[nn.Module, list[tuple[Tensor]]]:
    """A partly trained model, and batches."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    qsim.convert(model, POINTS)
    given = [(torch.randn(8, 1, 6, 6),) for _ in range(3)]
    loss(model, given[0]).backward()
    return model, given


def everything(model: nn.Module) -> dict[str, Any]:
    """Everything that must not change, and object identities."""
    found: dict[str, Any] = {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    found |= {f"gradient {name}": parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    found |= {f"object {name}": id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    for name, module in model.named_modules():
        if isinstance(module, FivePointModule):
            found |= {f"points {name}": id(module.points), f"in use {name}": module.in_use.points, f"stream {name}": module.stream}
            found |= {f"history {name} {point}": history.mark()[0] for point, history in histories_of(module).items()}
        found[f"mode {name}"] = module.training
    found |= {"generator": torch.get_rng_state(), "seed": torch.initial_seed()}
    return found


def check_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name], name


@pytest.mark.parametrize("measure", MEASURES)
def test_all_is_as_it_was(measure: str) -> None:
    model, batches = trained()
    twin = copy.deepcopy(model)
    for own, copied in zip(model.modules(), twin.modules(), strict=True):
        if hasattr(own, "stream_source"):  # copies draw other noise
            copied.stream_source = own.stream_source
    before = everything(model)
    assert any("amaxes" in name for name in before), "there must be histories to leave alone"
    MEASURES[measure](model, loss, batches)
    check_same(before, everything(model))
    # Training continues unaffected: the next step draws, scales and normalizes like that of a twin that was not measured.
    state = torch.get_rng_state()
    steps = []
    for one in (model, twin):
        torch.set_rng_state(state)
        one.zero_grad()
        loss(one, batches[1]).backward()
        steps.append(everything(one))
    assert all(torch.equal(value, steps[1][name]) for name, value in steps[0].items() if isinstance(value, Tensor))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("failing", [1, 6, 12])
def test_all_is_as_it_was_when_the_loss_fails(measure: str, failing: int) -> None:
    model, batches = trained()
    before, calls = everything(model), []

    def fails(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        value = loss(model, batch)
        calls.append(value)
        if len(calls) == failing:
            raise KeyboardInterrupt
        return value

    with pytest.raises(KeyboardInterrupt):
        MEASURES[measure](model, fails, batches)
    assert len(calls) == failing
    check_same(before, everything(model))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("measure", MEASURES)
def test_a_seed_decides_everything(measure: str) -> None:
    model, _ = trained()
    # A loader that shuffles draws the order of its data from torch's generator.
    loader = DataLoader(TensorDataset(torch.randn(32, 1, 6, 6)), batch_size=8, shuffle=True)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        found.append(MEASURES[measure](model, loss, loader, seed=seed).rows())
        assert torch.equal(before, torch.get_rng_state())
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_buffers_that_a_pass_replaces_are_put_back() -> None:
    class Counts(nn.Linear):
        seen: Tensor

        def forward(self, input: Tensor) -> Tensor:
            self.seen = self.seen + 1
            return super().forward(input)

    counting = Counts(4, 4)
    counting.register_buffer("seen", torch.zeros(()))
    own = counting.seen
    model = nn.Sequential(counting, qsim.nn.Linear(4, 2, points=PLAIN))
    gradient_error(model, loss, [(torch.randn(4, 4),) for _ in range(3)], draws=2)
    assert counting.seen is own
    assert own == 0
