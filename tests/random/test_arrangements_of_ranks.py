"""Layers, optimizers and runs in several processes: which noise they share, and which they do not."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

import qsim
from qsim import FivePoint, random
from support.comparing import same_bits
from support.distributed_models import coarse, mesh_of, shared_as, whole
from support.halfway import COIN, COUNT, WEIGHT, check_independent, filled, linear
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

two, eight = ranks_of(2), ranks_of(8)


def _own(device: torch.device) -> dict[str, Tensor]:
    """Draws of single ranks, although all have the same seed."""
    torch.manual_seed(5)
    x = torch.full((COUNT, 1), 1.25, device=device)
    layer = qsim.convert(filled(nn.Linear(1, 1, bias=False), 1.0).to(device), FivePoint(act=COIN, grad=COIN, act_bwd=None))
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


def _alike(device: torch.device) -> list[Tensor]:
    """Weights and updates, with ranks seeded by their rank; a process alone is rank 0."""
    torch.manual_seed(distributed.get_rank() if distributed.is_initialized() else 0)
    net = qsim.convert(linear().to(device), WEIGHT)
    with torch.no_grad():
        copied, made = copy.deepcopy(net), filled(qsim.nn.Linear(64, 32, bias=False, points=WEIGHT).to(device))
    optimizers = [qsim.optim.SGD(layer.parameters(), lr=2.0**-8, format="bf16") for layer in (net, copied)]
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
    first, second = two(_alike)
    expected = _alike(torch.device("cpu"))
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
    return net, call, qsim.optim.SGD(net.parameters(), lr=2.0**-8, format="bf16")


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
    optimizer = qsim.optim.SGD(net.parameters(), lr=2.0**-8, format="bf16")
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
