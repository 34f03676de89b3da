"""Arrangements of layers, optimizers, runs and ranks that share noise, and those that do not: one test per guarantee.

All tests round numbers halfway between two values, so that noise is coin tosses. Independent coins agree half of the time.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import qsim
from qsim import FivePoint, Quantizer, random
from qsim.random import seeds
from support.bounds import check_share
from support.comparing import same_bits
from support.distributed_models import coarse, mesh_of, shared_as, whole
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

BF16 = torch.bfloat16
COIN = Quantizer("e2m1", "stochastic")
WEIGHT = FivePoint(weight=COIN)
COUNT = 2048
two, eight = ranks_of(2), ranks_of(8)


def check_independent(*coins: Tensor) -> None:
    """Assert that no two of some tensors agree more or less often than independent coins do."""
    flips = [x.flatten() == x.max() for x in coins]
    for i, first in enumerate(flips):
        check_share(int(first.sum()), first.numel(), 0.5, tests=len(flips) ** 2)
        for second in flips[:i]:
            check_share(int((first == second).sum()), first.numel(), 0.5, tests=len(flips) ** 2)


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
    net = qsim.convert(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), FivePoint(*[COIN] * 5))
    return net, qsim.optim.AdamW(net.parameters(), lr=2.0**-6, weight="bf16")


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


def filled(layer: Any, value: float = 1.25) -> Any:
    with torch.no_grad():
        layer.weight.fill_(value)
    return layer


def linear() -> Any:
    return filled(nn.Linear(64, 32, bias=False))


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
    layer = filled(qsim.nn.Linear(shape[1], 1, bias=False, points=FivePoint(**{point: COIN})), 1.0)

    def batch() -> Tensor:
        x = torch.full(shape, 1.25, requires_grad=True)
        y = layer(x)
        of_x, of_weight = torch.autograd.grad(y, (x, layer.weight), torch.full_like(y, 1.25 if point == "grad" else 1.0))
        return {"act": y.detach(), "act_bwd": of_weight, "grad": of_x}[point]

    check_independent(*(batch() for _ in range(3)))


# Ranks.


def _own(device: torch.device) -> dict[str, Tensor]:
    """Draws of single ranks, although all have the same seed."""
    torch.manual_seed(5)
    x = torch.full((COUNT, 1), 1.25, device=device)
    layer = qsim.convert(filled(nn.Linear(1, 1, bias=False), 1.0).to(device), FivePoint(act=COIN, grad=COIN))
    y = layer(x.requires_grad_())
    y.backward(torch.full_like(y, 1.25))
    with torch.no_grad(), qsim.fpu("bf16", rounding="stochastic"):
        unit = x.detach() + 2.0**-8
    direct = qsim.quantize(x.detach(), "e2m1", rounding="stochastic")
    assert x.grad is not None
    return {"activations": y.detach(), "gradients": x.grad, "fpu": unit, "quantize": direct, "Quantizer": COIN(x.detach())}


def _shared(device: torch.device) -> list[Tensor]:
    """Common draws of all ranks, given the same seed or generators in the same state."""
    x, generator = torch.full((COUNT,), 1.25, device=device), torch.Generator().manual_seed(3)
    with qsim.fpu("bf16", rounding="stochastic", generator=generator):
        unit = x + 2.0**-8
    return [unit, qsim.quantize(x, "e2m1", "stochastic", generator=generator), COIN(x, generator=generator), COIN(x, seed=4)]


@NEEDS_GLOO
def test_draws_of_single_ranks_are_independent_and_can_be_shared(eight: Ranks) -> None:
    found = eight(_own)
    for name in found[0]:
        check_independent(*(own[name] for own in found))
    for first, *others in zip(*eight(_shared), strict=True):
        assert all(same_bits(first, other) for other in others)


def _alike(device: torch.device, alone: bool) -> list[Tensor]:
    """Weights and updates, with ranks seeded by their rank."""
    rank = 0 if alone else distributed.get_rank()
    torch.manual_seed(rank)
    net = qsim.convert(linear().to(device), WEIGHT)
    with torch.no_grad():
        copied, made = copy.deepcopy(net), filled(qsim.nn.Linear(64, 32, bias=False, points=WEIGHT).to(device))
    optimizers = [qsim.optim.SGD(layer.parameters(), lr=2.0**-8, weight="bf16") for layer in (net, copied)]
    rounded = [layer(torch.eye(64, device=device)).detach() for layer in (net, copied, made)]
    for layer, optimizer in zip((net, copied), optimizers, strict=True):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    return [*rounded, net.weight.detach(), copied.weight.detach()]


def _converted_in_turn(device: torch.device, seeds: list[tuple[int, int]]) -> list[Tensor]:
    """Rounded weights of models that are converted one after another, each with its seeds by rank."""
    found = []
    for by_rank in seeds:
        torch.manual_seed(by_rank[distributed.get_rank()])
        layer = qsim.convert(linear().to(device), WEIGHT)
        torch.manual_seed(0)  # a weight's seed follows from the initial seed, too
        found.append(layer(torch.eye(64, device=device)).detach())
    return found


@NEEDS_GLOO
@pytest.mark.parametrize("seeds", [[(10, 11), (10, 10)], [(10, 11), (20, 21), (10, 21)]], ids=["one rank again", "each rank again"])
def test_ranks_agree_on_the_seed_of_every_conversion_though_one_has_drawn_it_before(two: Ranks, seeds: list[tuple[int, int]]) -> None:
    for mine, theirs in zip(*two(_converted_in_turn, seeds), strict=True):
        assert same_bits(mine, theirs)


@NEEDS_GLOO
def test_all_ranks_take_what_rank_0_has_drawn_for_weights_and_updates(two: Ranks) -> None:
    first, second = two(_alike, False)
    torch.manual_seed(0)
    expected = _alike(torch.device("cpu"), alone=True)
    # A weight's seed also depends on torch's initial seed, which is 0 here as on rank 0.
    for mine, theirs, due in zip(first, second, expected, strict=True):
        assert same_bits(mine, theirs)
        assert same_bits(mine, due)


def _laid_out(
    device: torch.device, layout: str, *, scale: float = 1.0, seed: int = 0
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A net of two layers that round their weights, the module to call, and an optimizer that rounds updates."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed if layout == "alone" else seed + distributed.get_rank())
    net = nn.Sequential(nn.Linear(16, 40, bias=False), nn.Linear(40, 16, bias=False)).to(device)
    with torch.no_grad():
        for number, p in enumerate(net.parameters()):
            p.copy_(scale * coarse(*p.shape, seed=number))
    call = qsim.convert(net, WEIGHT)
    if layout == "ddp":
        call = nn.parallel.DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    elif layout == "fsdp":
        fully_shard(net, mesh=mesh_of(device), reshard_after_forward=True)
    elif layout == "tp":
        parallelize_module(net, mesh_of(device), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return net, call, qsim.optim.SGD(net.parameters(), lr=2.0**-8, weight="bf16")


def _stepped_in(net: nn.Module, call: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, which: range) -> list[Tensor]:
    """Compute the results of the layers in each of some steps, and their weights after it; sums of these numbers are exact."""
    found = []
    for step in which:
        with torch.no_grad():
            found.append(call(torch.eye(16, device=device)))
        for number, p in enumerate(net.parameters()):
            p.grad = shared_as(coarse(*p.shape, seed=10 + 2 * step + number), p)
        optimizer.step()
        found += [whole(p) for p in net.parameters()]
    return found


def _in_a_layout(device: torch.device, layout: str) -> list[Tensor]:
    return _stepped_in(*_laid_out(device, layout), device, range(2))


@NEEDS_GLOO
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_eight_ranks_round_weights_and_updates_as_one_process(eight: Ranks, layout: str) -> None:
    expected = _in_a_layout(torch.device("cpu"), "alone")
    for found in eight(_in_a_layout, layout):
        assert all(map(same_bits, found, expected))


def _updated_after_another_seed(device: torch.device, layout: str) -> list[Tensor]:
    """Weights after each of two steps, in processes that have agreed on a seed before they were seeded again."""
    torch.manual_seed(0 if layout == "alone" else distributed.get_rank())
    random.shared_seed()
    results = _stepped_in(*_laid_out(device, layout, seed=100), device, range(2))
    return [*results[1:3], *results[4:]]


@NEEDS_GLOO
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_updates_follow_from_the_seed_before_the_optimizer_is_made(eight: Ranks, layout: str) -> None:
    expected = _updated_after_another_seed(torch.device("cpu"), "alone")
    for found in eight(_updated_after_another_seed, layout):
        assert all(map(same_bits, found, expected))


def _saved(device: torch.device, layout: str, folder: str) -> None:
    """A step that is saved."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net, call, optimizer = _laid_out(device, layout)
    _stepped_in(net, call, optimizer, device, range(1))
    checkpoint.save(dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True)), checkpoint_id=folder)


def _resumed(device: torch.device, layout: str, folder: str) -> list[Tensor]:
    """The second step, from another run's checkpoint; weights and the optimizer's seed are others before."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    net, call, _ = _laid_out(device, layout, scale=2.0)
    optimizer = qsim.optim.SGD(net.parameters(), lr=2.0**-8, weight="bf16")
    model, state = get_state_dict(net, optimizer)
    checkpoint.load({"model": model, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
    return _stepped_in(net, call, optimizer, device, range(1, 2))


@NEEDS_GLOO
@pytest.mark.parametrize("layouts", [("fsdp", "tp"), ("tp", "fsdp")])
@pytest.mark.parametrize("grows", [True, False])
def test_runs_resume_on_another_number_of_ranks(two: Ranks, eight: Ranks, tmp_path: Path, layouts: tuple[str, str], grows: bool) -> None:
    before, after = (two, eight) if grows else (eight, two)
    before(_saved, layouts[0], str(tmp_path))
    expected = _in_a_layout(torch.device("cpu"), "alone")[3:]
    for found in after(_resumed, layouts[1], str(tmp_path)):
        assert all(map(same_bits, found, expected))


@NEEDS_GLOO
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_resumes_a_run_of_eight_ranks(eight: Ranks, tmp_path: Path) -> None:
    eight(_saved, "fsdp", str(tmp_path))
    expected = _in_a_layout(torch.device("cpu"), "alone")[3:]
    assert all(map(same_bits, _resumed(torch.device("cpu"), "alone", str(tmp_path)), expected))
