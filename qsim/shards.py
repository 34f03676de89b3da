"""Where in a distributed tensor the share of this process lies."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qsim.random import WHOLE, Place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_distributed(x: Tensor) -> bool:
    """Whether a tensor is a DTensor; plain ones are told apart without importing torch.distributed."""
    if type(x) in (Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # brings much of torch.distributed along

    return isinstance(x, DTensor)


def local(x: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, unless it is a DTensor. To be called under `torch.no_grad()`."""
    return x.to_local() if is_distributed(x) else x  # type: ignore[attr-defined]


def placed_as(x: Tensor, other: Tensor) -> Tensor:
    """A DTensor placed as another is."""
    placements = other.placements  # type: ignore[attr-defined]
    return x if x.placements == placements else x.redistribute(placements=placements)  # type: ignore[attr-defined]


def place_of(x: DTensor) -> Place:
    """Where in a distributed tensor the share of this process lies.

    A tensor may be cut along its first dimension, along one other, or along both, and along each of them several times, as FSDP2 does with
    what tensor parallelism has cut already.

    Args:
        x: The distributed tensor.

    Raises:
        ValueError: If the share is a summand, or its elements do not lie in rows at equal distances.
    """
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"this process holds no share of tensors on {x.device_mesh}")
    return _place(x.shape, x.device_mesh, tuple(x.placements), tuple(coordinate))


@lru_cache(maxsize=4096)
def _place(whole: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], coordinate: tuple[int, ...]) -> Place:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    cuts = {dim: how for dim, how in enumerate(placements) if isinstance(how, (Shard, _StridedShard))}
    if any(how.is_partial() for how in placements):
        raise ValueError(f"summands of a tensor have no place in it: redistribute it first, got placements {placements}")
    for dim, how in cuts.items():
        # FSDP2 cuts what other dimensions of the mesh have cut already: its share lies in one piece if it counts all of their cuts.
        later = [int(mesh.size(other)) for other, cut in cuts.items() if other > dim and cut.dim == how.dim]
        if isinstance(how, _StridedShard) and how.split_factor != math.prod(later):
            raise ValueError(f"a share must lie in one piece along each dimension, got placements {placements}")
    inner = sorted({how.dim for how in cuts.values()} - {0})
    if len(inner) > 1:
        raise ValueError(f"a tensor may be cut along its first dimension and one other, got cuts along {inner}: {placements}")
    if not cuts:
        return WHOLE
    shape, start = compute_local_shape_and_global_offset(whole, mesh, placements)
    offset = sum(first * math.prod(whole[dim + 1 :]) for dim, first in enumerate(start))
    first = not any(coordinate[dim] for dim in cuts)
    row, stride = (math.prod(sizes[inner[0] :]) for sizes in (shape, whole)) if inner else (0, 0)
    return Place(offset, 0, 0, first) if row == stride else Place(offset, row, stride, first)
