"""Layers that get wider points during a run, by the measure of `assign`."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer
from qsim.control import Fallback, fallback as fallback_module
from qsim.diagnostics import assign

pytestmark = pytest.mark.filterwarnings("ignore:Fallback")

Pair = tuple[Tensor, Tensor]
WIDE = FivePoint("bf16", "bf16", "bf16")
NARROW = FivePoint(*3 * [Quantizer("e2m1", scale="tensor")])


def loss(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def converted(seed: int = 0, points: Any = NARROW) -> nn.Module:
    torch.manual_seed(seed)
    return qsim.convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Flatten(), nn.Linear(16, 4)), points)


def batches(scale: float = 1.0) -> list[Pair]:
    generator = torch.Generator().manual_seed(1)
    return [(scale * torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)) for _ in range(3)]


def errors(model: nn.Module, probes: int = 1) -> dict[str, float]:
    """The error of each layer with its points, as `assign` measures it."""
    candidates = {"points": model[0].points, "wide": WIDE}
    found = assign(model, batches(), loss, budget="points", candidates=candidates, probes=probes, seed=0)
    own = found.sensitivities.filter(candidate="points")
    return {name: sum(record.error for record in own.filter(layer=name)) for name in ("0", "2", "4")}


def test_the_error_is_that_of_assign() -> None:
    model = converted()
    measured = errors(model)
    bound = sorted(measured.values())[1]
    with pytest.warns(UserWarning, match=r"^Fallback: step 0: \w has wider points from now on: its error is .* of a tensor underflow$"):
        fallback = Fallback(WIDE, batches, loss, error=bound, probes=1).start(model)
    (moved,) = fallback.moved
    assert measured[moved.layer] == max(measured.values()) == pytest.approx(moved.error)
    assert moved.step == 0
    assert [model[int(name)].points == WIDE for name in ("0", "2", "4")] == [name == moved.layer for name in ("0", "2", "4")]


def test_a_layer_is_moved_when_its_numbers_underflow() -> None:
    """During the run the inputs shrink below E4M3's smallest number."""
    model, scale = converted(points=FivePoint("e4m3", "e4m3")), [1.0]
    fallback = Fallback("bf16", lambda: batches(scale[0]), loss, underflow=0.2, every=2, probes=1).start(model)
    assert not fallback.moved
    scale[0] = 1e-4
    fallback.step()
    assert not fallback.moved
    fallback.step()
    assert [(record.layer, record.step) for record in fallback.moved] == [("0", 2)]
    share = float((qsim.quantize(batches(1e-4)[0][0], "e4m3") == 0).double().mean())
    assert fallback.moved[0].underflowed == pytest.approx(share, abs=0.02)
    assert model[0].points.act is not None
    assert model[0].points.act.format == qsim.format("bf16")
    assert model[2].points.act.format == qsim.format("e4m3")
    assert "0" in str(fallback.moved)


@pytest.mark.filterwarnings("ignore:Fallback")
def test_a_layer_is_moved_once() -> None:
    fallback = Fallback(WIDE, batches, loss, error=0.0, every=1, probes=1).start(converted())
    fallback.step()
    assert [(record.layer, record.step) for record in fallback.moved] == [("0", 0), ("2", 0), ("4", 0)]


def test_the_run_is_otherwise_unchanged() -> None:
    """Random bits, weights and streams are those of a run without a fallback."""
    noisy = FivePoint("e4m3", Quantizer("e4m3", "stochastic"), Quantizer("e5m2", "stochastic"))
    one, other = converted(points=noisy), converted(points=noisy)
    before, states = [layer.stream for layer in (other[0], other[2])], []
    for model in (one, other):
        torch.manual_seed(5)
        fallback = Fallback(WIDE, batches, loss, error=1e9, every=1, probes=1).start(model) if model is other else None
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in batches():
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            if fallback is not None:
                fallback.step()
        states.append(model.state_dict())
    assert [layer.stream for layer in (other[0], other[2])] == before
    assert [layer.stream for layer in (one[0], one[2])] == before
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def test_a_run_is_resumed() -> None:
    model = converted()
    fallback = Fallback(WIDE, batches, loss, error=0.0, probes=1).start(model)
    fallback.step()
    state = json.loads(json.dumps(fallback.state_dict()))
    resumed = converted(1)
    again = Fallback(WIDE, list, loss, error=0.0, probes=1)  # nothing is measured at the start
    again.load_state_dict(state)
    again.start(resumed)
    assert again.moved == fallback.moved
    assert again.state_dict() == state
    assert all(resumed[k].points == WIDE for k in (0, 2, 4))
    again.load_state_dict(state)
    with pytest.raises(ValueError, match=r"the state has a layer '2', and the model has 0$"):
        again.start(qsim.convert(nn.Sequential(nn.Linear(16, 32)), "e4m3"))
    with pytest.raises(ValueError, match=r"a state has steps and layers, got step"):
        again.load_state_dict({"step": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"give a bound, error= or underflow="),
        ({"error": -1.0}, r"error must be a number from 0 to inf, got -1.0"),
        ({"underflow": 1.5}, r"underflow must be a number from 0 to 1, got 1.5"),
        ({"error": 1.0, "every": 0}, r"every must be"),
        ({"error": 1.0, "batches": 3}, r"batches must be a function that returns batches, got int"),
        ({"error": 1.0, "to": "fp3"}, r"fp3"),
    ],
)
def test_errors_of_arguments(options: dict[str, Any], message: str) -> None:
    given = {"to": WIDE, "batches": batches, **options}
    with pytest.raises((TypeError, ValueError), match=message):
        Fallback(given.pop("to"), given.pop("batches"), loss, **given)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), r"no linear layer or convolution that rounds: convert it first"),
        (converted(points=FivePoint(act=Quantizer("e4m3", scale=qsim.scaling.Delayed(4)))), r"the layer 0 has delayed scales"),
        (converted(points=FivePoint(act=torch.sign)), r"the layer 0 has the callable sign at act"),
    ],
)
def test_errors_of_models(model: nn.Module, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Fallback(WIDE, batches, loss, error=1.0).start(model)
    with pytest.raises(RuntimeError, match="start it first"):
        Fallback(WIDE, batches, loss, error=1.0).step()


def test_an_error_without_a_value_is_beyond_every_bound() -> None:
    """Gradients beyond 448 are NaN in E4M3, which has no infinity."""
    model = converted(points=FivePoint(grad="e4m3"))
    fallback = Fallback(WIDE, batches, lambda model, batch: 1e6 * loss(model, batch), error=1e30, probes=1).start(model)
    assert [record.layer for record in fallback.moved] == ["0", "2", "4"]
    assert all(math.isnan(record.error) for record in fallback.moved)


def test_every_measurement_has_random_bits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, own = [], fallback_module.probing

    def noted(*args: Any) -> Any:
        seeds.append(args[-1])
        return own(*args)

    monkeypatch.setattr(fallback_module, "probing", noted)
    fallback = Fallback(WIDE, batches, loss, error=1e9, every=2, probes=1).start(converted())
    for _ in range(4):
        fallback.step()
    assert len(seeds) == len(set(seeds)) == 3
