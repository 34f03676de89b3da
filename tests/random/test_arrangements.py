"""Arrangements of layers, optimizers and runs that share noise, and those that do not: one test per guarantee."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer, random
from qsim.random import seeds
from support.comparing import same_bits
from support.halfway import COIN, COUNT, WEIGHT, check_independent, filled, linear
from support.points import in_order

BF16 = torch.bfloat16


# Optimizers: weights of 1 that a step changes by half of bfloat16's spacing.

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: qsim.optim.AdamW(params, lr=2.0**-8, weight_decay=0.0),
    "Adam": lambda params: qsim.optim.Adam(params, lr=2.0**-8),
    "SGD": lambda params: qsim.optim.SGD(params, lr=2.0**-8),
    "StochasticAdamW": lambda params: qsim.optim.StochasticAdamW(params, lr=2.0**-8, weight_decay=0.0),
    "Quantized": lambda params: qsim.optim.Quantized(torch.optim.SGD(params, 2.0**-8), weight=Quantizer("bf16", "stochastic")),
}


def stepped(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], *groups: int) -> list[Tensor]:
    """Equal parameters after a step with equal gradients, each number of them in a separate optimizer."""
    made = []
    for count in groups:
        # Quantized rounds float32; the others have bfloat16.
        dtype = torch.float32 if make is OPTIMIZERS["Quantized"] else BF16
        params = [nn.Parameter(torch.full((COUNT,), 1 + 2.0**-7, dtype=dtype)) for _ in range(count)]
        made.append((params, make(params)))
    for params, optimizer in made:
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return [p.detach() for params, _ in made for p in params]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_parameters_round_independently(name: str) -> None:
    make = OPTIMIZERS[name]
    check_independent(*stepped(make, 3))
    check_independent(*stepped(make, 2, 2))
    check_independent(*stepped(make, 1, 1, 1))


# Runs.


def experiment() -> Tensor:
    """The coins of a typical script: a model is created, converted, copied and trained for a step; tensors are rounded directly."""
    with torch.no_grad():
        model = nn.Linear(32, COUNT // 32, bias=False)
        model.weight.fill_(1.25)
    copied = copy.deepcopy(qsim.convert(model, WEIGHT))
    coins = [net(torch.eye(32)).detach().flatten() - 1 for net in (model, copied)]
    coins += [x for make in OPTIMIZERS.values() for x in stepped(make, 1)]
    with qsim.fpu("bf16", rounding="stochastic"):
        unit = torch.ones(COUNT) + 2.0**-8
    return torch.stack([*coins, COIN(torch.full((COUNT,), 1.25)), unit])


@pytest.mark.slow
def test_a_repeated_experiment_is_another_sample_unless_it_is_seeded() -> None:
    for first, second in zip(experiment(), experiment(), strict=True):
        check_independent(first, second)
    torch.manual_seed(7)
    expected = experiment()
    torch.manual_seed(7)
    assert same_bits(experiment(), expected)
    script = f"import sys; sys.path[:0] = {sys.path!r}; import qsim, torch; from {__name__} import experiment; torch.manual_seed(7); "
    script += "print(qsim.random.stream(*map(int, experiment().double().view(torch.int64).flatten().tolist())))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(found) == random.stream(*map(int, expected.double().view(torch.int64).flatten().tolist())), "in a new process"


def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = qsim.convert(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), in_order(*[COIN] * 5))
    return net, qsim.optim.AdamW(net.parameters(), lr=2.0**-6, format="bf16")


def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights after two more steps."""
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def resume(folder: str) -> None:
    """Two more steps from a checkpoint in a folder; save the weights next to it."""
    net, optimizer = begun()
    saved = torch.load(f"{folder}/checkpoint")
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["generator"])
    torch.save(trained(net, optimizer), f"{folder}/weights")


@pytest.mark.slow
def test_a_checkpoint_resumed_in_a_new_process_goes_on_to_the_bit(tmp_path: Path) -> None:
    net, optimizer = begun()
    trained(net, optimizer)
    saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "generator": torch.get_rng_state()}
    assert [*saved["model"]] == ["0.weight", "0.bias", "2.weight", "2.bias"], "as without points"
    torch.save(saved, tmp_path / "checkpoint")
    expected = trained(net, optimizer)
    script = f"import sys; sys.path[:0] = {sys.path!r}; from {__name__} import resume; resume({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert all(map(same_bits, torch.load(tmp_path / "weights"), expected))


# Layers.


def seen(layer: Any) -> Tensor:
    """The rounded weight of a layer."""
    result: Tensor = layer(torch.eye(64)).detach()
    return result


def _converted_twice() -> list[Tensor]:
    layer = qsim.convert(linear(), WEIGHT)
    first = seen(layer)
    return [first, seen(qsim.convert(layer, WEIGHT)), seen(qsim.convert(qsim.revert(layer), WEIGHT))]


def _copied() -> list[Tensor]:
    layer = qsim.convert(linear(), WEIGHT)
    made = filled(qsim.nn.Linear(64, 32, bias=False, points=WEIGHT))
    return [seen(each) for each in (layer, copy.deepcopy(layer), copy.deepcopy(nn.Sequential(layer)), made, copy.deepcopy(made))]


def _converted_apart() -> list[Tensor]:
    return [seen(qsim.convert(each, WEIGHT)) for each in (linear(), linear(), nn.Sequential(linear()), nn.Sequential(linear()))]


def _encoder() -> list[Tensor]:
    layer = nn.TransformerEncoderLayer(64, 2, dim_feedforward=32, batch_first=True)
    for each in (layer.linear1, layer.self_attn.out_proj):
        filled(each)
    encoder = nn.TransformerEncoder(qsim.convert(layer, WEIGHT), 3, enable_nested_tensor=False)
    return [seen(inner.linear1) - inner.linear1.bias for inner in encoder.layers]  # type: ignore[operator, union-attr]


def _made_with_defaults() -> list[Tensor]:
    return [seen(filled(qsim.nn.Linear(64, 32, bias=False, points=WEIGHT))) for _ in range(3)]


@pytest.mark.parametrize("arrangement", [_converted_twice, _copied, _converted_apart, _encoder, _made_with_defaults])
def test_equal_weights_round_independently(arrangement: Callable[[], list[Tensor]]) -> None:
    check_independent(*(x.round(decimals=3) for x in arrangement()))


def test_zero_weights_take_seeds_of_their_own() -> None:
    layers = [filled(qsim.nn.Linear(64, 32, points=WEIGHT), 0.0) for _ in range(3)]
    assert len({int(seeds.weight_seed(layer.weight, layer.stream)) for layer in layers}) == 3


def test_layers_tied_to_one_weight_round_it_independently_and_a_layer_called_twice_alike() -> None:
    # Noise belongs to a place where a weight is read: a weight that is read in two places is rounded in each.
    one, other = linear(), linear()
    other.weight = one.weight
    model = qsim.convert(nn.ModuleList([one, other, one]), WEIGHT)
    first, second, third = (seen(layer) for layer in model)
    check_independent(first, second)
    assert same_bits(first, third)


def test_micro_batches_of_a_step_share_the_noise_of_weights() -> None:
    layer = qsim.convert(linear(), FivePoint(weight=COIN, weight_bwd=COIN))

    def backward() -> Tensor:
        x = torch.zeros(32, 64, requires_grad=True)
        return torch.autograd.grad(layer(x), x, torch.eye(32))[0]

    assert same_bits(seen(layer), seen(layer))
    assert same_bits(backward(), backward())


@pytest.mark.parametrize("point", ["act", "act_bwd", "grad"])
def test_micro_batches_of_a_step_share_no_other_noise(point: str) -> None:
    # The other factor of each product is 1.
    shape = (1, COUNT) if point == "act_bwd" else (COUNT, 1)
    layer = filled(qsim.nn.Linear(shape[1], 1, bias=False, points=FivePoint(**{"act_bwd": None, "weight_bwd": None, point: COIN})), 1.0)

    def batch() -> Tensor:
        x = torch.full(shape, 1.25, requires_grad=True)
        y = layer(x)
        of_x, of_weight = torch.autograd.grad(y, (x, layer.weight), torch.full_like(y, 1.25 if point == "grad" else 1.0))
        return {"act": y.detach(), "act_bwd": of_weight, "grad": of_x}[point]

    check_independent(*(batch() for _ in range(3)))
