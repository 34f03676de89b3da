"""Embeddings whose indices or tables are distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

import qsim
from qsim import FivePoint
from qsim.accumulators import Rounded
from support.comparing import same_bits
from support.distributed_models import alike, coarse, mesh_of, noisy, place, whole
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO

two = ranks_of(2)


def _lookup(device: torch.device, points: FivePoint, places: tuple[str, str], padding_idx: int | None) -> dict[str, Any]:
    from torch.distributed.tensor import distribute_tensor

    mesh, rank = mesh_of(device), distributed.get_rank()
    indices = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(0)).to(device)
    table, g = coarse(13, 10, seed=1).to(device), coarse(4, 6, 10, seed=2).to(device)
    x, shared = (distribute_tensor(t, mesh, [place(how)]) for t, how in zip((indices, table), places, strict=True))
    results = []
    for given, weight, seed in ((x, shared.requires_grad_(), 2 + rank), (indices, table.requires_grad_(), 2)):
        torch.manual_seed(seed)
        y = qsim.nn.functional.embedding(given, weight, padding_idx, points, stream=4)
        getattr(y, "full_tensor", lambda y=y: y)().backward(g)
        assert weight.grad is not None
        # A negative zero loses its sign when it is added to another rank's.
        results.append([whole(y) + 0.0, whole(weight.grad) + 0.0])
    return {"shared": results[0], "alone": results[1]}


@pytest.mark.parametrize("places", [("all", "0"), ("all", "1"), ("0", "all"), ("all", "all"), ("1", "0")], ids="-".join)
@pytest.mark.parametrize("padding_idx", [None, 2, 12])
def test_lookups_in_shares(two: Ranks, places: tuple[str, str], padding_idx: int | None) -> None:
    for seen in two(_lookup, FivePoint(weight="e2m1", grad="e2m1", weight_bwd=None), places, padding_idx):
        assert alike(seen["shared"], seen["alone"])


@pytest.mark.parametrize("places", [("all", "0"), ("all", "1"), ("all", "all")], ids="-".join)
def test_lookups_in_shares_with_an_accumulator(two: Ranks, places: tuple[str, str]) -> None:
    for seen in two(_lookup, FivePoint(grad="e2m1", accumulate=Rounded("e2m1", rounding="odd")), places, 2):
        assert alike(seen["shared"], seen["alone"])
    drawn = [seen["shared"] for seen in two(_lookup, FivePoint(accumulate=Rounded("e2m1", rounding="stochastic")), places, 2)]
    assert alike(*drawn)


@pytest.mark.parametrize("places", [("all", "0"), ("all", "all")], ids="-".join)
def test_lookups_in_shares_with_noise(two: Ranks, places: tuple[str, str]) -> None:
    first, second = two(_lookup, FivePoint(weight=noisy("e2m1"), grad=noisy("e2m1"), weight_bwd=None), places, None)
    assert alike(first["shared"], first["alone"])
    assert alike(first["shared"], second["shared"])
    assert not same_bits(first["alone"][1], second["alone"][1])
