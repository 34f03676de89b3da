"""Scales of distributed tensors: those of the whole, computed together by the processes that hold shards of it.

Scales of channels and of whole tensors follow from the largest magnitudes of all shards. Blocks, tiles and transforms stay within a
process: shards that would cut them raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from qsim.nn.product.along import Along
from qsim.nn.product.plans import ProductPlan
from qsim.nn.product.sites import Site
from qsim.random.shards import sizes
from qsim.scaling import PerBlock, PerTile

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class MeshShare:
    """This process's shard of an operand.

    Attributes:
        shape: The shape of the whole.
        mesh: The processes.
        placements: Its placements on them.
        channels: The dimensions along which a channel extends.
    """

    shape: tuple[int, ...]
    mesh: DeviceMesh
    placements: Placements
    channels: tuple[int, ...] = ()

    def along(self, direction: Along, merges: bool) -> MeshShare:
        """The shard of an operand, with its dimensions in a product."""
        return MeshShare(self.shape, self.mesh, self.placements, tuple(direction.channel_dims(len(self.shape), merges)))

    def of_all(self, amaxes: Tensor) -> Tensor:
        """The largest magnitude of the whole tensor, from that of the shard."""
        own = amaxes.amax() if amaxes.numel() else amaxes.new_zeros(())
        return self._largest(own.view(1, 1, 1), range(len(self.shape)))

    def of_channels(self, amaxes: Tensor) -> Tensor:
        """The largest magnitudes of the whole tensor's channels, from those of the shard's."""
        own = amaxes if amaxes.numel() else amaxes.new_zeros([max(size, 1) for size in amaxes.shape])
        return self._largest(own, self.channels)

    def _largest(self, amaxes: Tensor, dims: Sequence[int]) -> Tensor:
        """The maximum over the shards along some dimensions."""
        how = [Partial("max") if _dim_of(placement) in dims else Replicate() for placement in self.placements]
        if all(placement.is_replicate() for placement in how):
            return amaxes
        # Collectives do not specify how they treat a NaN; for a scale an infinity is equivalent.
        plain = torch.where(amaxes.isnan(), math.inf, amaxes)
        return DTensor.from_local(plain, self.mesh, how, run_check=False).full_tensor()

    def check(self, site: Site) -> None:
        """Raise an error for shards that would cut elements that are scaled or transformed together."""
        if site.call is not None:
            raise ValueError(
                f"{site.name}: {site.call.name} would get the shard of a distributed tensor: give a format or a Quantizer, or shard with "
                "FSDP2, whose layers multiply whole tensors"
            )
        if site.quantizer is None or site.along is None:
            return
        name, scale, dims = site.name, site.quantizer.scale, len(self.shape)
        summed, (rows, columns) = site.along.summed_dims(dims, site.merges), site.along.matrix_dims(dims, site.merges)
        if site.transform is not None:
            self._check_even(name, f"a transform of {site.transform.size}", summed, site.transform.size)
        if isinstance(scale, PerBlock):
            self._check_even(name, f"blocks of {scale.size}", summed, scale.size)
        if isinstance(scale, PerTile):
            what = f"tiles of {scale.height} by {scale.width}"
            self._check_even(name, what, rows, scale.height)
            self._check_even(name, what, columns, scale.width)

    def _check_even(self, name: str, what: str, dims: Sequence[int], size: int) -> None:
        """Raise an error for shards that cut pieces of a size along dimensions that count as one."""
        for place, dim in enumerate(dims):
            length, chunk = self.shape[dim], self.shape[dim]
            for placement, count in zip(self.placements, sizes(self.mesh), strict=True):
                chunk = -(-chunk // count) if _dim_of(placement) == dim else chunk
            inner, outer = math.prod([self.shape[i] for i in dims[place + 1 :]]), math.prod([self.shape[i] for i in dims[:place]])
            if chunk < length and (chunk * inner % size or (outer > 1 and length * inner % size)):
                cut = f"{length * inner} elements that are cut into shares of {chunk * inner}"
                raise ValueError(f"{name}: {what} along {cut}: each share must hold whole ones")


def _dim_of(placement: Placement) -> int | None:
    """The dimension along which a tensor is cut."""
    return getattr(placement, "dim", None) if placement.is_shard() else None


def shares_of(a: DTensor, w: DTensor, shape: torch.Size, out: Placements, plan: ProductPlan) -> tuple[MeshShare, MeshShare, MeshShare]:
    """This process's shards of the operands and the result of a product.

    Raises:
        ValueError: If shards would cut blocks, tiles or transforms.
    """
    mesh = w.device_mesh
    first, second = MeshShare(tuple(a.shape), mesh, tuple(a.placements)), MeshShare(tuple(w.shape), mesh, tuple(w.placements))
    result = MeshShare(tuple(shape), mesh, out)
    first.check(plan.first.forward)
    second.check(plan.second.forward)
    if torch.is_grad_enabled():
        result.check(plan.gradient.for_first)
        second.check(plan.second.backward)
        result.check(plan.gradient.for_second)
        first.check(plan.first.backward)
    if plan.product.is_lookup:  # if rows are sharded, each process rounds a gradient of the whole's shape, with zeros where others look up
        result = replace(result, placements=tuple(Shard(0) if how.is_partial() else how for how in out))
    return first, second, result
