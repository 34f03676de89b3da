"""A schedule of a sharded model gives the bits of the same model in one piece."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import qsim
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
