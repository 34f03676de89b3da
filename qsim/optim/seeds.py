"""The default seed of an optimizer: drawn at construction, and agreed on by all processes with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from qsim.random import places, seeds, shards, streams


class DrawsSeed:
    """An optimizer's seed, as long as it is only this process's draw."""

    _drawn: int | None = None

    def _draw_seed(self) -> int:
        """A seed from torch's generator: one for all groups, until it is agreed on."""
        if self._drawn is None:
            self._drawn = seeds.fresh_seed()
        return self._drawn

    def _agreed_seed(self, seed: int, params: Sequence[Tensor]) -> int:
        """The seed that all processes use if this one has `seed`, which was given, loaded or drawn here.

        Call it under `torch.no_grad()`, in all processes that hold the parameters or shards of them.
        """
        if seed != self._drawn:
            return seed
        self._drawn = None
        return agreed(seed, params)


def agreed(seed: int, params: Sequence[Tensor]) -> int:
    """The seed that the first of the processes with the same weights has drawn; in a run of one process, its own.

    Processes whose optimizers hold other weights, such as pipeline stages, get different seeds, even if they drew the same.

    Raises:
        RuntimeError: While a CUDA graph is captured: the weights are compared on the host.
    """
    if not streams.is_one_of_several():
        return seed
    if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the processes agree on an optimizer's seed in its first step: take one before a CUDA graph is captured, or give seed="
        )
    drawn: list[Any] = [None] * distributed.get_world_size()
    own = _fingerprint(params)
    distributed.all_gather_object(drawn, (own, seed))
    first, found = next((rank, theirs) for rank, (weights, theirs) in enumerate(drawn) if weights == own)
    return streams.rank_stream(found, first)


def _fingerprint(params: Sequence[Tensor]) -> int:
    """A checksum of the weights: the same in all processes, however the weights are sharded."""
    sums: dict[Any, list[tuple[int, Tensor]]] = {}
    for number, p in enumerate(params):
        where = (p.device_mesh, tuple(p.placements)) if shards.is_distributed(p) else p.device  # type: ignore[attr-defined]
        place = shards.place_of(p) if shards.is_distributed(p) else places.WHOLE  # type: ignore[arg-type]
        share = torch.ops.qsim.checksum.default(shards.local(p).detach(), number if place.first else 0, *place[:3])
        sums.setdefault(where, []).append((number, share))
    found: dict[int, int] = {}
    for where, numbered in sums.items():
        total = torch.stack([own for _, own in numbered])
        if isinstance(where, tuple):
            total = _summed(total, *where)
        found.update(zip((number for number, _ in numbered), total.tolist(), strict=True))
    return streams.stream("weights", *(found[number] for number in range(len(params))))


def _summed(shares: Tensor, mesh: Any, placements: tuple[Any, ...]) -> Tensor:
    """The sums over the processes that hold shards of the same tensors."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    # Tested this way because FSDP2's split of an already sharded dimension is not a `Shard` in torch.
    summands = [Replicate() if how.is_replicate() else Partial() for how in placements]
    return DTensor.from_local(shares, mesh, summands, run_check=False).full_tensor()
