"""Models for distributed runs: the same in every process, of numbers whose sums are exact, so that they are equal bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

import qsim
from qsim import FivePoint, Quantizer, Stochastic
from support.comparing import same_bits


def noisy(fmt: str) -> Quantizer:
    return Quantizer(fmt, Stochastic())


#: A gradient that saturates, although it has no scale.
SATURATED = Quantizer("e2m1", overflow="saturate")
# Sums of products of these numbers are exact in float32 in any order, so that results can be compared bit for bit.
NEAREST = FivePoint("e2m1", "e2m1", "e2m1", "e2m1", SATURATED)
NOISY = FivePoint(*[noisy("e2m1")] * 4, Quantizer("e2m1", Stochastic(), overflow="saturate"))
REUSED = FivePoint("e2m1", noisy("e2m1"), "same", "same", SATURATED)


def coarse(*shape: int, seed: int) -> Tensor:
    """Numbers with few bits, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(8).round().div(8)


class TensorParallelBlock(nn.Module):
    """A block for tensor-parallel plans."""

    def __init__(self, width: int = 16, hidden: int = 33) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(x)).relu())
        return y


def model(device: torch.device, points: FivePoint | None = None, hidden: int = 33) -> nn.Sequential:
    """The same in every process."""
    net = nn.Sequential(TensorParallelBlock(hidden=hidden), TensorParallelBlock(hidden=hidden)).to(device)
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(coarse(*parameter.shape, seed=i))
    return net if points is None else converted(net, points)


def converted(net: Any, points: FivePoint) -> Any:
    """A model converted with the seed that every other one here draws; each rank draws its own, and rank 0's is used."""
    torch.manual_seed(100 + distributed.get_rank())
    return qsim.convert(net, points)


def run(net: nn.Module, x: Tensor, seed: int, batch: int = 0) -> Tensor:
    """The forward and backward pass of a step; each batch has its own gradients."""
    torch.manual_seed(seed)
    y: Tensor = net(x)
    y.backward(coarse(*y.shape, seed=100 + batch).to(y))
    return y.detach()


def gradients(net: nn.Module) -> list[Tensor]:
    return [whole(parameter.grad) for parameter in net.parameters() if parameter.grad is not None]


def whole(x: Tensor) -> Tensor:
    full = getattr(x, "full_tensor", None)
    result: Tensor = x if full is None else full()
    return result.detach().clone()


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(map(same_bits, a, b))


def check(name: str, found: Tensor, wanted: Tensor) -> None:
    """Compare results, with tolerances for norms: their outputs are not rounded, so sums in another order differ slightly.

    Nor what it hands back as a gradient: the bias before the second norm gets all bits of float32 with the first step, and then it matters
    whether the shares of tensor parallelism are added up before it or after it.
    """
    if "norm" in name or name == "0.down.bias":
        torch.testing.assert_close(found, wanted)
    else:
        assert same_bits(found, wanted), name


def place(name: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if name == "all" else Shard(int(name))


def mesh_of(device: torch.device, *sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = sizes or (distributed.get_world_size(),)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("data", "tensor")[-len(sizes) :])


def spread(x: Tensor, mesh: Any, names: str) -> Any:
    """A parameter with placements given as letters: `r`eplicated, sharded along a dimension, or `s`: by FSDP2, after tensor parallelism."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if not names.startswith("s"):
        placements = [Replicate() if name == "r" else Shard(int(name)) for name in names]
        return nn.Parameter(distribute_tensor(x.clone(), mesh, placements), requires_grad=x.is_floating_point())
    holder = nn.Module()
    holder.weight = nn.Parameter(distribute_tensor(x.clone(), mesh["tensor"], [Shard(int(names[1:]))]), requires_grad=x.is_floating_point())
    fully_shard(holder, mesh=mesh["data"])
    return holder.weight


def shared_as(values: Tensor, p: Tensor) -> Tensor:
    """A replicated tensor with the placements of a parameter: its gradient, whose shards are then the same however it is sharded."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    values = values.to(p.device, p.dtype)
    if not isinstance(p, DTensor):
        return values
    if all(how.is_replicate() or type(how) is Shard for how in p.placements):
        return distribute_tensor(values, p.device_mesh, p.placements)
    # FSDP2 is applied last to the dimension that it names first.
    for dim in (1, 0):
        pieces = values.chunk(p.device_mesh.size(dim))
        rank = p.device_mesh.get_local_rank(dim)
        values = pieces[rank] if rank < len(pieces) else values[:0]
    return DTensor.from_local(values, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def parallelized(net: nn.Module, mesh: Any, sequence: bool) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInputOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    apart = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "*.up": ColwiseParallel(input_layouts=apart),
        "*.down": RowwiseParallel(output_layouts=apart, use_local_output=not sequence),
    }
    if sequence:
        between = PrepareModuleInputOutput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
        )
        plan |= {"*.norm": SequenceParallel(), **{str(i): between for i in range(2)}}
    return parallelize_module(net, mesh, plan)


def doubled(device: torch.device, mesh: Any) -> nn.Module:
    """A tensor-parallel layer that returns, on both of two ranks, the inputs as rounded by the first and by the second."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer = nn.Linear(16, 32, bias=False, device=device)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(16).repeat(2, 1))
    qsim.convert(layer, FivePoint(act=noisy("e2m1")))
    return parallelize_module(layer, mesh, ColwiseParallel(output_layouts=place("all")))


def rounded_alike(y: Tensor) -> bool:
    """Whether both ranks rounded the input of a `doubled` layer, which is between 1 and 1.5, identically."""
    assert set(y.unique().tolist()) == {1.0, 1.5}
    return same_bits(*y.chunk(2, -1))
