"""`qsim.optim.Quantized` with tensors that are sharded in any dimension, summands, and optimizers that work on their shards.

`tests/optim/test_distributed.py` and `test_resumed.py` cover it in models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from qsim.optim import Quantized
from support.comparing import same_bits
from support.distributed_models import alike, coarse, mesh_of, shared_as, spread, whole
from support.distributed_optimizers import COPIES, NOISY
from support.optimizers import MAKERS
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO
two, four = ranks_of(2), ranks_of(4)


def results(optimizer: Quantized) -> list[Tensor]:
    """Weights, states and accumulators as whole tensors."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    saved = optimizer.state_dict()["state"]
    return [whole(p) for p in params] + [whole(saved[i][name]) for i in range(len(params)) for name in sorted(saved[i])]


def gradient(p: Tensor, step: int, number: int) -> Tensor:
    """The same numbers for a parameter and for its shards."""
    return shared_as(0.3 * coarse(*p.shape, seed=100 * step + number), p)


def steps(optimizer: Quantized, which: range) -> list[Tensor]:
    for step in which:
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            p.grad = gradient(p, step, number)
        optimizer.step()
    return results(optimizer)


def _placed(device: torch.device, sizes: tuple[int, ...], names: str, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters with some placements, and the same parameters unsharded."""
    values = [coarse(*shape, seed=i).to(device) for i, shape in enumerate([(5, 7, 6), (9, 8, 5), (1, 3, 1)])]
    mesh = mesh_of(device, *sizes)
    params = [spread(x, mesh, names) for x in values]
    optimizer = Quantized(MAKERS["AdamW"](params), **options)
    sharded = steps(optimizer, range(3))
    alone = Quantized(MAKERS["AdamW"]([nn.Parameter(x) for x in values]), **options, seed=optimizer.seed)
    return sharded, steps(alone, range(3))


@pytest.mark.parametrize("names", ["r", "0", "1", "2"])
def test_tensor_parallelism_is_as_one_process(two: Ranks, names: str) -> None:
    for sharded, alone in two(_placed, (2,), names, COPIES):
        assert alike(sharded, alone)


@pytest.mark.slow
def test_nearest_needs_no_place(four: Ranks) -> None:
    for sharded, alone in four(_placed, (2, 2), "12", {"weight": "e4m3", "grad": "e5m2", "state": "bf16"}):
        assert alike(sharded, alone)


def _summands(device: torch.device) -> tuple[Tensor, Tensor]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    mesh = mesh_of(device)
    p = nn.Parameter(distribute_tensor(torch.zeros(3, device=device), mesh, [Replicate()]))
    p.grad = DTensor.from_local(torch.tensor([0.3, 1.0, 1.7], device=device), mesh, [Partial()], run_check=False)
    Quantized(torch.optim.SGD([p], 1.0), grad="e2m1").step()
    return whole(p), whole(p.grad)


def test_gradients_are_summed_before_they_are_rounded(two: Ranks) -> None:
    for p, rounded in two(_summands):
        assert rounded.tolist() == [0.5, 2.0, 3.0], "sums are 0.6, 2 and 3.4; 2 · 0.3 rounded apart were 1"
        assert same_bits(p, -rounded)


class Local(torch.optim.Optimizer):
    """As written by some users: it works on the local shards, and stores plain tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            share, g = (getattr(x, "to_local", lambda x=x: x)() for x in (p, p.grad))
            total = self.state[p].setdefault("total", torch.zeros_like(share))
            total.add_(g)
            share.sub_(total, alpha=0.125)


def _local(device: torch.device, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from torch.distributed.tensor import Shard, distribute_tensor

    values = coarse(5, 7, seed=0).to(device)
    p, alone = nn.Parameter(distribute_tensor(values, mesh_of(device), [Shard(dim)])), nn.Parameter(values.clone())
    for x in (p, alone):
        optimizer = Quantized(Local([x]), **NOISY, seed=4)
        for step in range(2):
            x.grad = gradient(x, step, 0)
            optimizer.step()
        if x is p:
            total = optimizer.state[p]["total"].contiguous()
    rest = optimizer.state[alone]["total"].chunk(2, dim)[distributed.get_rank()].contiguous()
    return whole(p), alone.detach(), total, rest


@pytest.mark.parametrize("dim", [0, 1])
def test_plain_states_of_shares_are_rounded_as_the_whole(two: Ranks, dim: int) -> None:
    for p, alone, total, rest in two(_local, dim):
        assert same_bits(p, alone)
        assert same_bits(total, rest)
