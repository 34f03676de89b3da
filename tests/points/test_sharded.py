"""Ready-made points under data parallelism and FSDP2, sharded before they have seen a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import qsim
from qsim.points import LSQ, PACT, Codebook
from support.comparing import same_bits
from support.distributed_models import mesh_of, whole
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO
two = ranks_of(2)


class Block(nn.Module):
    """A linear layer with learned points, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act, self.weight, self.table = PACT("int4", alpha=2.0), LSQ("int4"), Codebook([-2.0, -0.5, 0.5, 2.0], learned=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(nn.functional.linear(self.act(x), self.weight(self.linear.weight), self.linear.bias))


class Net(nn.Module):
    """Two blocks after a point with a learned step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = LSQ("int8"), nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def net_on(device: torch.device | str) -> Net:
    torch.manual_seed(0)
    with torch.device(device):
        return Net()


def batch(step: int, rank: int, device: torch.device) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)


def trained(net: nn.Module, device: torch.device, rank: int, steps: int = 3) -> list[Tensor]:
    """The parameters after some steps."""
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for step in range(steps):
        optimizer.zero_grad()
        net(batch(step, rank, device)).square().mean().backward()
        optimizer.step()
    return [whole(parameter) for parameter in net.parameters()]


def _sharded(device: torch.device, start: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    alone, net = net_on(device), net_on("meta" if start == "meta" else device)
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh_of(device))
    if start == "meta":
        net.to_empty(device=device)
        with torch.no_grad():
            for name, own in net.named_parameters():
                local = whole(alone.get_parameter(name)).tensor_split(distributed.get_world_size())[distributed.get_rank()]
                own.to_local().copy_(local)  # type: ignore[attr-defined]
        for module in net.modules():
            if isinstance(module, LSQ):
                module.reset_parameters()  # its buffer; the parameters have been set above
    # Both ranks get the same numbers, so that they train as a single process does.
    parameters, due = trained(net, device, rank=0), trained(alone, device, rank=0)
    return {"parameters": parameters, "due": due, "buffers": list(net.buffers()), "due buffers": list(alone.buffers())}


@pytest.mark.parametrize("start", ["created", "meta"])
def test_fully_sharded_points_train_as_in_one_process(two: Ranks, start: str) -> None:
    for seen in two(_sharded, start):
        assert len(seen["parameters"]) == len(seen["due"]) == 11
        for found, due in zip(seen["parameters"] + seen["buffers"], seen["due"] + seen["due buffers"], strict=True):
            torch.testing.assert_close(found, due)
        assert all(buffer.item() > 0 for buffer in seen["buffers"])


def _replicated(device: torch.device) -> dict[str, Any]:
    net = net_on(device)
    ids = [device.index] if device.type == "cuda" else None
    replica = nn.parallel.DistributedDataParallel(net, device_ids=ids)
    parameters = trained(replica, device, rank=distributed.get_rank())
    return {"parameters": parameters, "state": net.state_dict(), "step": net.first.step.detach()}


def test_replicas_agree_on_steps_that_each_has_set_from_its_own_tensors(two: Ranks) -> None:
    first, second = two(_replicated)
    assert all(map(same_bits, first["parameters"], second["parameters"]))
    assert first["state"].keys() == second["state"].keys()
    assert all(same_bits(first["state"][name], second["state"][name]) for name in first["state"])
    assert first["step"].item() > 0


def test_no_parameter_is_a_number() -> None:
    # FSDP2 does not shard parameters without dimensions.
    points = [LSQ("int4"), PACT(), Codebook(qsim.points.NF4, learned=True)]
    assert all(parameter.dim() == 1 for point in points for parameter in point.parameters())
