"""Schedules and controls in two processes: sharded models have the bits of whole ones, and processes whose data differ act alike."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

import qsim
from qsim.control import Fallback, MovedLayers, OutControl
from support.comparing import same_bits
from support.distributed_models import mesh_of, model, noisy, whole
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO
two = ranks_of(2)

WEIGHTS = qsim.FivePoint("e4m3", noisy("e4m3"), "e5m2")


def _train(net: nn.Module, device: torch.device) -> list[Tensor]:
    optimizer = qsim.optim.SGD(net.parameters(), lr=2.0**-6, update="nearest", seed=1)
    schedule = qsim.Schedule({0: "bf16", 2: WEIGHTS, 4: None})
    schedule.load_state_dict({"step": 0, "seed": 5})
    schedule.start(net)
    for step in range(6):
        # The ranks have the same data, and only weights are noisy, so that their mean gradient is that of each.
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        net(x.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return [whole(parameter.detach()) for parameter in net.parameters()]


def _both(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    from torch.distributed.fsdp import fully_shard

    alone, sharded = model(device, None), model(device, None)
    fully_shard(sharded, mesh=mesh_of(device))
    return _train(alone, device), _train(sharded, device)


def test_fsdp(two: Ranks) -> None:
    for alone, sharded in two(_both):
        assert all(map(same_bits, alone, sharded))


def _fall_back(device: torch.device) -> tuple[MovedLayers, list[int]]:
    """In the last process, inputs underflow from the first step on; in the other never."""
    rank, scale = distributed.get_rank(), 1.0
    torch.manual_seed(0)
    net = qsim.convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), "e4m3").to(device)

    def batches() -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(rank)
        return [(scale * torch.randn(32, 16, generator=generator).to(device), torch.arange(32, device=device) % 4) for _ in range(3)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fallback = Fallback("bf16", batches, lambda net, x: F.cross_entropy(net(x[0]), x[1]), underflow=0.2, every=2, probes=1).start(net)
        scale = 1e-4 if rank else 1.0
        for _ in range(4):
            fallback.step()
    return fallback.moved, [layer.points.act.format.bits for layer in (net[0], net[2])]


def test_a_layer_that_one_process_moves_is_moved_in_all(two: Ranks) -> None:
    (calm, bits), (underflown, others) = two(_fall_back)
    (record,), (other,) = calm, underflown
    assert (record.layer, record.step) == (other.layer, other.step) == ("0", 2)
    assert bits == others == [16, 8]
    # Each process has measured its own batches.
    assert record.underflowed < 0.2 < other.underflowed


def _choose(device: torch.device) -> list[int]:
    """Each process has the largest channel of its own, and one that is the second largest in both."""
    net, x = qsim.convert(nn.Sequential(nn.Linear(16, 4)), "mxfp4").to(device), torch.ones(8, 16, device=device)
    x[:, distributed.get_rank()], x[:, 9] = 10.0, 8.0
    control = OutControl(share=1 / 16, window=1).start(net)
    net(x)
    control.step()
    return control.channels["0"]


def test_channels_are_chosen_by_the_sums_over_processes(two: Ranks) -> None:
    assert two(_choose) == [[9], [9]]
