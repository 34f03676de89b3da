"""The position of this process's shard in a distributed tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qsim.random.places import Place

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
    """This process's shard of a tensor: all of it, unless it is a DTensor. Call it under `torch.no_grad()`."""
    return x.to_local() if is_distributed(x) else x  # type: ignore[attr-defined]


def placed_as(x: Tensor, other: Tensor) -> Tensor:
    """A DTensor placed as another is."""
    placements = other.placements  # type: ignore[attr-defined]
    return x if x.placements == placements else x.redistribute(placements=placements)  # type: ignore[attr-defined]


def sizes(mesh: DeviceMesh) -> list[int]:
    """The number of processes along each dimension of a mesh; older compilers cannot trace its `shape`."""
    return [mesh.size(dim) for dim in range(mesh.ndim)]


def coordinates(mesh: DeviceMesh) -> list[int]:
    """The position of this process on a mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"this process holds no share of tensors on {mesh}")
    return list(coordinate)


def span(x: DTensor, dim: int) -> tuple[int, int]:
    """The index in the whole of a share's first row or column, and how many it has; dimensions of the mesh cut as `torch.chunk` does."""
    start, length = 0, x.shape[dim]
    along = [
        (how, place, size)
        for how, place, size in zip(x.placements, coordinates(x.device_mesh), sizes(x.device_mesh), strict=True)
        if _is_cut(how) and how.dim == dim  # type: ignore[attr-defined]
    ]
    # FSDP2 comes first in the mesh, and splits what later dimensions have already sharded.
    cuts = [cut for cut in along if not _split_factor(cut[0])] + [cut for cut in along[::-1] if _split_factor(cut[0])]
    for _, place, size in cuts:
        chunk = -(-length // size)
        skipped = min(place * chunk, length)
        start, length = start + skipped, min(chunk, length - skipped)
    return start, length


def place_of(x: DTensor) -> Place:
    """The position of this process's shard in a distributed tensor.

    A tensor may be cut along its first dimension, along one other, or along both, and along each of them several times, as FSDP2 does with
    what tensor parallelism has cut already.

    Args:
        x: The distributed tensor.

    Raises:
        ValueError: If the share is a summand, or its elements are not in rows at equal distances.
    """
    _check_cuts(x)
    inner = max([0, *(how.dim for how in x.placements if _is_cut(how))])  # type: ignore[attr-defined]
    (row, _), (start, length) = span(x, 0), span(x, inner)
    first = not any(place for place, how in zip(coordinates(x.device_mesh), x.placements, strict=True) if _is_cut(how))
    offset = row * math.prod(x.shape[1:])
    if not inner or length == x.shape[inner]:
        return Place(offset, 0, 0, first)
    beyond = math.prod(x.shape[inner + 1 :])
    return Place(offset + start * beyond, length * beyond, x.shape[inner] * beyond, first)


def _is_cut(how: Placement) -> bool:
    # Tested this way because FSDP2's split of an already sharded dimension is not a `Shard` in torch.
    return not how.is_replicate() and not how.is_partial()


def _split_factor(how: Placement) -> int:
    """Into how many pieces a tensor had been cut that was cut out of turn; otherwise 0."""
    return int(getattr(how, "split_factor", 0))


def refuse_summands(x: DTensor) -> None:
    """Raise an error for a tensor of which processes hold summands."""
    if any(how.is_partial() for how in x.placements):
        raise ValueError(f"summands of a tensor have no place in it: redistribute it first, got placements {x.placements}")


def _check_cuts(x: DTensor) -> None:
    refuse_summands(x)
    cuts = [(how, size) for how, size in zip(x.placements, sizes(x.device_mesh), strict=True) if _is_cut(how)]
    for number, (how, _) in enumerate(cuts):
        # Only a cut that counts all of the later ones leaves shares in one piece.
        later = [size for other, size in cuts[number + 1 :] if other.dim == how.dim]  # type: ignore[attr-defined]
        if _split_factor(how) not in (0, math.prod(later)):
            raise ValueError(f"a share must be in one piece along each dimension, got placements {x.placements}")
    inner = sorted({how.dim for how, _ in cuts} - {0})  # type: ignore[attr-defined]
    if len(inner) > 1:
        raise ValueError(f"a tensor may be cut along its first dimension and one other, got cuts along {inner}: {x.placements}")
