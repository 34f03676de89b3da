"""Positions of distributed tensors' shards, checked on tensors whose elements are their own indices."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qsim.random import shards
from qsim.random.places import Place
from support.distributed_models import mesh_of, spread
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO
two, four = ranks_of(2), ranks_of(4)

SHAPES = [(8,), (5,), (1,), (8, 6), (5, 7), (3, 4, 5), (2, 3, 1, 5)]


def indices(place: Place, count: int) -> list[int]:
    """The indices in the whole of a shard with this position and size."""
    row = place.row or max(count, 1)
    return [place.offset + i // row * place.stride + i % row for i in range(count)]


def _places(device: torch.device, sizes: tuple[int, ...], names: str, shapes: list[tuple[int, ...]]) -> list[Any]:
    mesh, seen = mesh_of(device, *sizes), []
    for shape in shapes:
        x = spread(torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device).reshape(shape), mesh, names)
        with torch.no_grad():
            seen.append((shards.local(x).reshape(-1).tolist(), tuple(shards.place_of(x))))
    return seen


def check(ranks: list[list[Any]], shapes: list[tuple[int, ...]], copies: int) -> None:
    for number, shape in enumerate(shapes):
        found = [seen[number] for seen in ranks]
        for values, place in found:
            assert values == indices(Place(*place), len(values)), (shape, place)
        assert sorted(index for values, _ in found for index in values) == sorted([*range(torch.Size(shape).numel())] * copies)
        assert sum(place[-1] for _, place in found) == copies, "one share is the first"


@pytest.mark.parametrize("names", ["r", "0", "1", "2"])
def test_places_on_two_ranks(two: Ranks, names: str) -> None:
    shapes = [shape for shape in SHAPES if names == "r" or len(shape) > int(names)]
    check(two(_places, (2,), names, shapes), shapes, 2 if names == "r" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["00", "s0", "s1", "r0", "r1", "01", "10", "02"])
def test_places_on_four_ranks(four: Ranks, names: str) -> None:
    deepest = max(int(name) for name in names if name.isdigit())
    shapes = [shape for shape in SHAPES if len(shape) > deepest]
    check(four(_places, (2, 2), names, shapes), shapes, 2 if "r" in names else 1)


@pytest.mark.parametrize("rows", [8, 13, 3])
def test_spans_of_rows_that_three_dimensions_of_a_mesh_cut(rows: int) -> None:
    """FSDP2, twice, splits what tensor parallelism has cut: dimensions of the mesh cut in turn, the last one first."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0))
    for place in itertools.product(range(2), repeat=3):
        mesh = SimpleNamespace(ndim=3, size=lambda dim: 2, get_coordinate=lambda place=place: list(place))
        x: Any = SimpleNamespace(shape=(rows, 5), placements=placements, device_mesh=mesh)
        start, length = shards.span(x, 0)
        left = torch.arange(rows)
        for own in place[::-1]:
            left = (*left.chunk(2), left[:0])[own]
        assert [*range(start, start + length)] == left.tolist(), place


def _refused(device: torch.device, names: str) -> str:
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kinds = {"p": Partial(), "s": _StridedShard(0, split_factor=3)}
    placements = [kinds.get(name) or Shard(int(name)) for name in names]
    x = DTensor.from_local(torch.ones(2, 2, 2, device=device), mesh_of(device, 2, 2), placements, run_check=False)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        shards.place_of(x)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "words"),
    [("12", "cut along its first dimension and one other, got cuts along [1, 2]"), ("p0", "redistribute it first"), ("s0", "in one piece")],
)
def test_unsupported_placements_raise_an_error(four: Ranks, names: str, words: str) -> None:
    assert all(words in message for message in four(_refused, names))


def test_cuts_along_two_inner_dimensions_are_refused_before_any_work() -> None:
    from torch.distributed.tensor import Shard

    mesh = SimpleNamespace(ndim=3, size=lambda dim: 2, get_coordinate=lambda: (0, 0, 0))
    cut: Any = SimpleNamespace(placements=(Shard(0), Shard(1), Shard(2)), device_mesh=mesh, shape=torch.Size((2, 2, 2)))
    with pytest.raises(ValueError, match=r"cut along its first dimension and one other, got cuts along \[1, 2\]"):
        shards.place_of(cut)


def test_plain_tensors_are_whole() -> None:
    x = torch.ones(3)
    assert not shards.is_distributed(x)
    assert shards.local(x) is x
