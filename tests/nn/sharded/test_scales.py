"""Scales of distributed tensors: the same as those of the whole, however it is sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import FivePoint, Quantizer
from qsim.scaling import Delayed, PerBlock, PerRow, PerTensor, PerTile, Scaling
from support.distributed_models import alike, coarse, converted, gradients, mesh_of, model, parallelized, place, run, whole
from support.points import in_order
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO
two = ranks_of(2)

# Powers of two, so that every product and every sum is exact in any order.
EXACT: dict[str, Any] = {"format": "e8m0", "rule": "ceil"}
SCALES: dict[str, Scaling] = {
    "tensor": PerTensor(**EXACT),
    "channel": PerRow(**EXACT),
    "blocks": PerBlock(3, **EXACT),
    "tiles": PerTile(3, 2, **EXACT),
    "under": PerBlock(3, format="e4m0", rule="ceil", outer=PerTensor(**EXACT)),
}
LAYOUTS = [(x, w) for x in ("all", "0", "1", "2") for w in ("all", "0", "1")]


def outlying(*shape: int, seed: int) -> Tensor:
    """Numbers with few bits whose largest are all in one shard."""
    x = coarse(*shape, seed=seed)
    x.view(-1)[-1] = 64.0
    return x


def _linear(device: torch.device, points: FivePoint, places: tuple[str, str], shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    from torch.distributed.tensor import distribute_tensor

    given = [outlying(*shape, seed=i).to(device) for i, shape in enumerate(shapes)]
    g = outlying(*shapes[0][:-1], shapes[1][0], seed=7).to(device)
    mesh = mesh_of(device)
    shares = [distribute_tensor(t, mesh, [place(how)]).requires_grad_() for t, how in zip(given, places, strict=True)]
    results = []
    for operands in (shares, [t.requires_grad_() for t in given]):
        y = qsim.nn.functional.linear(*operands, points=points)
        getattr(y, "full_tensor", lambda y=y: y)().backward(g)
        results.append([whole(t) for t in (y, *(t.grad for t in operands if t.grad is not None))])
    return results


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("places", LAYOUTS, ids="-".join)
def test_a_linear_layer_of_shares_has_the_scales_of_the_whole(two: Ranks, places: tuple[str, str], kind: str) -> None:
    points = in_order(*[Quantizer("e2m1", scale=SCALES[kind])] * 5)
    for found, expected in two(_linear, points, places, ((4, 6, 24), (12, 24))):
        assert len(found) == 3
        assert alike(found, expected)


def test_shares_of_nothing(two: Ranks) -> None:
    """One sample on two processes: the second has none, and gets its scale from the first."""
    for kind in ("tensor", "channel"):
        points = in_order(*[Quantizer("e2m1", scale=SCALES[kind])] * 5)
        for found, expected in two(_linear, points, ("0", "all"), ((1, 4, 6), (3, 6))):
            assert alike(found, expected)


def test_transforms_of_shares(two: Ranks) -> None:
    point = Quantizer("e2m1", scale=PerTensor(**EXACT), transform=qsim.transforms.Hadamard(4))
    for found, expected in two(_linear, in_order(*[point] * 5), ("2", "1"), ((4, 6, 24), (12, 24))):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("points", "places", "said"),
    [
        (in_order(*[Quantizer("e2m1", scale=PerBlock(8))] * 2), ("2", "1"), "act: blocks of 8 along 24 .* shares of 12"),
        (FivePoint(grad=Quantizer("e2m1", scale=PerBlock(4)), act_bwd="e4m3"), ("all", "0"), "grad: blocks of 4 along 12 .* of 6"),
        (FivePoint(act_bwd=Quantizer("e2m1", scale=PerBlock(8)), grad="e4m3"), ("0", "all"), "act_bwd: blocks of 8 .* of 12"),
        (FivePoint(act_bwd=Quantizer("e2m1", scale=PerBlock(2)), grad="e4m3"), ("1", "all"), "act_bwd: blocks of 2 along 6 .* of 3"),
        (
            FivePoint(weight=Quantizer("e2m1", scale=PerTile(4, 4)), weight_bwd=None),
            ("all", "0"),
            "weight: tiles of 4 by 4 along 12 .* of 6",
        ),
        (in_order(*[Quantizer("e2m1", transform="Hadamard(8)")] * 2), ("2", "1"), "act: a transform of 8 along"),
        (FivePoint(act="FourOverSix()"), ("2", "1"), "act: FourOverSix would get the shard of a distributed tensor: .* FSDP2"),
        (FivePoint(weight="LSQ('int4')"), ("all", "0"), "weight: LSQ, with a gradient of its own, does not take distributed tensors"),
    ],
)
def test_shares_that_would_cut_blocks_are_refused(two: Ranks, points: FivePoint, places: tuple[str, str], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        two(_linear, points, places, ((4, 6, 24), (12, 24)))


def _plan(device: torch.device, points: FivePoint, sequence: bool, convert_last: bool) -> Any:
    reference = model(device, points, 36)
    net = parallelized(model(device, None if convert_last else points, 36), mesh_of(device), sequence)
    if convert_last:
        converted(net, points)
    results = []
    for each in (net, reference):
        for step in range(3):
            each.zero_grad()
            y = run(each, outlying(3, 8, 16, seed=step).to(device), 0)
        histories = [whole(buffer) for name, buffer in each.named_buffers() if name.endswith("amaxes")]
        results.append([y, *histories, *(g for g in gradients(each) if g.dim() == 2)])
    return results


@pytest.mark.parametrize(("sequence", "convert_last"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("scale", [SCALES["tensor"], Delayed(2, **EXACT)], ids=["tensor", "delayed"])
def test_tensor_parallel_plans(two: Ranks, scale: Scaling, sequence: bool, convert_last: bool) -> None:
    points = in_order(*[Quantizer("e2m1", scale=scale)] * 5)
    for found, expected in two(_plan, points, sequence, convert_last):
        assert alike(found, expected)


def _lookup(device: torch.device, points: FivePoint, places: tuple[str, str]) -> Any:
    from torch.distributed.tensor import distribute_tensor

    x, table = torch.tensor([[1, 5, 0, 7], [2, 2, 6, 3]]).to(device), outlying(8, 12, seed=1).to(device)
    g, mesh = outlying(2, 4, 12, seed=2).to(device), mesh_of(device)
    shares = distribute_tensor(x, mesh, [place(places[0])]), distribute_tensor(table, mesh, [place(places[1])]).requires_grad_()
    results = []
    for index, rows in (shares, (x, table.requires_grad_())):
        y = qsim.nn.functional.embedding(index, rows, points=points)
        getattr(y, "full_tensor", lambda y=y: y)().backward(g)
        results.append([whole(y), whole(rows.grad)])
    return results


@pytest.mark.parametrize("kind", ["tensor", "channel", "blocks", "under"])
@pytest.mark.parametrize("places", [("all", "0"), ("all", "1"), ("0", "all"), ("1", "all")], ids="-".join)
def test_tables_of_shares_have_the_scales_of_the_whole(two: Ranks, places: tuple[str, str], kind: str) -> None:
    point = Quantizer("e2m1", scale=SCALES[kind])
    for found, expected in two(_lookup, FivePoint(weight=point, grad=point, weight_bwd=None), places):
        assert all(map(torch.equal, found, expected))  # except for the sign of zeros, to which others are added
