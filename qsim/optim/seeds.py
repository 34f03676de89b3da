"""The seed of an optimizer that was given none: the same in all processes of a run, and another for other weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qsim import random, shards


def agreed(params: Sequence[Tensor]) -> int:
    """A seed made of `random.shared_seed` and of the weights as they are.

    However they are shared out, the weights are the same in all processes; so no process need tell another which of several optimizers it
    means. To be called under `torch.no_grad()`, by all processes that hold shares.

    Raises:
        RuntimeError: While a CUDA graph is captured: the seed is read back from the device.
    """
    if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the seed of an optimizer is agreed on in its first step: do one before a CUDA graph is captured, or give seed=")
    sums: dict[Any, list[tuple[int, Tensor]]] = {}
    for number, p in enumerate(params):
        where = (p.device_mesh, tuple(p.placements)) if shards.is_distributed(p) else p.device  # type: ignore[attr-defined]
        place = shards.place_of(p) if shards.is_distributed(p) else random.WHOLE  # type: ignore[arg-type]
        sums.setdefault(where, []).append((number, random.weight_seed(shards.local(p).detach(), number, place)))
    found: dict[int, int] = {}
    for where, numbered in sums.items():
        total = torch.stack([own for _, own in numbered])
        if isinstance(where, tuple):
            total = _summed(total, *where)
        found.update(zip((number for number, _ in numbered), total.tolist(), strict=True))
    return random.stream("optimizer", *(found[number] for number in range(len(params))))


def _summed(shares: Tensor, mesh: Any, placements: tuple[Any, ...]) -> Tensor:
    """The sums over the processes that hold shares of the same tensors."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    # Asked this way round because FSDP2's cut of what was cut before is no shard to torch.
    summands = [Replicate() if how.is_replicate() else Partial() for how in placements]
    return DTensor.from_local(shares, mesh, summands, run_check=False).full_tensor()
