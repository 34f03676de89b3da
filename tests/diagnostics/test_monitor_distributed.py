"""The monitor in distributed runs: each process counts its own part, and replicas stay identical."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import qsim
from qsim import FivePoint, Quantizer
from qsim.diagnostics import Monitor
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO

two = ranks_of(2)

NOISY = Quantizer("e5m2", rounding="stochastic")
POINTS = {
    "nearest under scales": Quantizer("e4m3", scale=qsim.scaling.PerTensor()),
    "noisy": NOISY,
    "noisy under scales": Quantizer("e4m3", rounding="stochastic", scale=qsim.scaling.PerTensor()),
}


def net(points: FivePoint, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return qsim.convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), points).to(device)


def _ddp(device: torch.device) -> dict[str, Any]:
    rank = distributed.get_rank()
    model = net(FivePoint("e4m3", NOISY, NOISY, NOISY, NOISY), device)
    alone = copy.deepcopy(model)
    ends = []
    for watched in (False, True):
        model.load_state_dict(alone.state_dict())
        replica = nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        optimizer = torch.optim.SGD(model.parameters(), 2.0**-6)
        monitor = Monitor(replica, every=2, optimizer=optimizer) if watched else None
        for step in range(3):
            torch.manual_seed(step)
            replica(torch.full((4 + rank, 16), 0.3 * (rank + 1), device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([parameter.detach().cpu().clone() for parameter in model.parameters()])
    assert monitor is not None
    monitor.close()
    elements = {(counts.layer, counts.point): counts.elements for counts in monitor.samples[-1].points}
    return {"ends": ends, "steps": [sample.step for sample in monitor.samples], "elements": elements}


def test_ddp(two: Ranks) -> None:
    for rank, found in enumerate(two(_ddp)):
        for one, other in zip(*found["ends"], strict=True):
            assert torch.equal(one, other)
        assert found["steps"] == [0, 2]
        assert found["elements"]["module.0", "act"] == (4 + rank) * 16
        assert found["elements"]["module.2", "grad"] == (4 + rank) * 16
        assert found["elements"]["module.0", "weight"] == 512


def _tensor_parallel(device: torch.device, kind: str, parallel: bool) -> dict[str, Any]:
    model = net(FivePoint(*[POINTS[kind]] * 5), device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.pow_(7).mul_(2.0**10)  # of all magnitudes, so that some underflow
    if parallel:
        mesh = init_device_mesh(device.type, (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(5)
    x = torch.randn(8, 16).to(device) ** 3
    with Monitor(model) as monitor:
        model(x).square().sum().backward()
        monitor.step()
    names = ("elements", "saturated", "underflowed", "exact")
    return {(counts.layer, counts.point): [getattr(counts, name) for name in names] for counts in monitor.samples[0].points}


@pytest.mark.parametrize("kind", POINTS)
def test_shares_of_weights_are_counted_as_the_whole_rounds(two: Ranks, kind: str) -> None:
    # The first weight is sharded by rows, the second by columns.
    whole, _ = two(_tensor_parallel, kind, False)
    shares = two(_tensor_parallel, kind, True)
    for layer in ("0", "2"):
        total = [sum(numbers) for numbers in zip(*(share[layer, "weight"] for share in shares), strict=True)]
        assert total == whole[layer, "weight"]
        assert total[2] > 0
    if kind.startswith("nearest"):
        assert shares[0]["0", "act"] == shares[1]["0", "act"] == whole["0", "act"]
