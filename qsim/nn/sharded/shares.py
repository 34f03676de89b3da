"""OperandShards of distributed tensors: placements, random bits, and seeds shared by a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from qsim.nn.product.tensors import OperandShards
from qsim.random import seeds
from qsim.random.shards import coordinates, place_of
from qsim.random.sources import Stream

Placements = tuple[Placement, ...]


def placed(x: DTensor, how: Placements) -> DTensor:
    """A tensor redistributed to given placements."""
    return x if tuple(x.placements) == how else x.redistribute(x.device_mesh, how)


def is_shard(placement: Placement, dim: int) -> bool:
    """Whether a tensor is sharded along a dimension, with shards of consecutive rows."""
    return type(placement) is Shard and placement.dim == dim


def refuse_shard(rule: str, placement: Placement) -> None:
    """Raise an error for an unsupported placement; the message states the rule."""
    if not placement.is_replicate() and not placement.is_partial():
        raise ValueError(f"{rule}, got {placement}")


def from_shards(shape: torch.Size | tuple[int, ...], local: Tensor, mesh: DeviceMesh, how: Placements) -> DTensor:
    """The distributed tensor made of the processes' shards."""
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, how, run_check=False, shape=torch.Size(shape), stride=strides)


def shards_of_weight(w: DTensor, of_input: Placements, of_result: Placements, sums: Sequence[Placements]) -> OperandShards:
    """The process's shards of an input, a weight and a result.

    Args:
        w: The weight.
        of_input: The placements of the input.
        of_result: Those of the result.
        sums: Those of the results of the three products.
    """
    mesh, coordinate = w.device_mesh, coordinates(w.device_mesh)
    adds_bias = not any(place for place, how in zip(coordinate, of_result, strict=True) if how.is_partial())
    return OperandShards((first_holder(mesh, of_input), 0, first_holder(mesh, of_result)), summing(mesh, sums), place_of(w), adds_bias)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def first_holder(mesh: DeviceMesh, placements: Placements) -> int:
    """The first of the processes that hold the same shard as this one."""
    index = tuple(place if how.is_shard() else 0 for place, how in zip(coordinates(mesh), placements, strict=True))
    return int(mesh.mesh[index])


def summing(mesh: DeviceMesh, results: Sequence[Placements]) -> tuple[int, int, int]:
    """For each of three products, the first of the processes that compute the same sums: shards of the result, or summands of it."""
    summands = [tuple(Shard(0) if how.is_partial() else how for how in placements) for placements in results]
    forward, grad_a, grad_w = (first_holder(mesh, placements) for placements in summands)
    return forward, grad_a, grad_w


def agreed_seed(a: DTensor, stream: Stream) -> Tensor:
    """A seed shared by the processes of the mesh: their own draw if they are seeded alike, else the largest one."""
    mesh, local = a.device_mesh, a.to_local()
    drawn = seeds.drawn(local.device, stream_number=stream).to(local.device, non_blocking=True)
    return DTensor.from_local(drawn, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()


def seed_of_shares(w: DTensor, stream: Stream, redraws: bool = False) -> Tensor:
    """`seeds.weight_seed` of the whole weight, from the sums of its shards."""
    summands = [Partial() if how.is_shard() else Replicate() for how in w.placements]
    seed = seeds.weight_seed(w.to_local().detach(), stream, place_of(w), redraws=redraws)
    return DTensor.from_local(seed, w.device_mesh, summands, run_check=False).full_tensor()
