"""Grouped products with distributed parameters: shards are rounded, and distributed operands are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from support.comparing import same_bits
from support.distributed_models import coarse, mesh_of
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO

two = ranks_of(2)
POINTS = qsim.recipes.fp8_hybrid().points


class Experts(nn.Module):
    """Experts that multiply by the shard of a stack, or by the stack itself."""

    def __init__(self, stack: Tensor, *, takes_shard: bool, casts: bool = False) -> None:
        super().__init__()
        self.stack, self.takes_shard, self.casts = nn.Parameter(stack), takes_shard, casts

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        stack: Any = self.stack
        stack = stack.to_local() if self.takes_shard else stack
        return torch._grouped_mm(x, stack.to(x.dtype) if self.casts else stack, offs=ends)


def _experts(device: torch.device) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, rank = mesh_of(device), torch.distributed.get_rank()
    whole, x, ends = coarse(4, 16, 24, seed=0).to(device), coarse(9, 16, seed=1 + rank).to(device), torch.tensor([4, 9], dtype=torch.int32)
    ends = ends.to(device)
    found: dict[str, Any] = {}
    for casts in (False, True):
        stack = distribute_tensor(whole.bfloat16() if casts else whole, mesh, [Shard(0)])
        model = qsim.convert(Experts(stack, takes_shard=True, casts=casts), POINTS)
        alone = qsim.convert(Experts(whole[2 * rank : 2 * rank + 2].clone(), takes_shard=False), POINTS)
        y, expected = model(x, ends), alone(x, ends)
        y.square().sum().backward()
        expected.square().sum().backward()
        with torch.no_grad():
            evaluated = model(x, ends)
        gradient: Any = model.stack.grad
        pairs = ((y, expected), (evaluated, expected), (gradient.to_local(), alone.stack.grad.to(stack.dtype)))
        found[f"shards, {casts=}"] = all(same_bits(a.detach(), b.detach()) for a, b in pairs)
    model = qsim.convert(Experts(stack, takes_shard=False), POINTS)
    for name, rows in (("distributed rows", distribute_tensor(x, mesh, [Replicate()])), ("plain rows", x)):
        with pytest.raises(TypeError, match=r"grouped products of distributed tensors .* multiply shards, weight.to_local"):
            model(rows, ends)
        found[name] = True
    return found


def test_shards_of_experts_are_rounded_by_their_process(two: Ranks) -> None:
    """Also after a cast, in training and in evaluation."""
    for found in two(_experts):
        assert len(found) == 4
        assert all(found.values()), found
