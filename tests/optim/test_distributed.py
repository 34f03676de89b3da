"""Low-precision optimizers in distributed runs: shards match the whole, and replicas stay identical. No rank is given a seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn

from qsim.optim import SGD
from support.distributed_models import mesh_of
from support.distributed_optimizers import MAKERS, SEED, alone, differing, net_of, optimizer_of, results, steps
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO
two, three, four = ranks_of(2), ranks_of(3), ranks_of(4)


# Shards.


def _shared_out(device: torch.device, layout: str, kind: str) -> dict[str, Any]:
    net = net_of(device, layout)
    optimizer = optimizer_of(kind, net)
    found = {
        "seed": torch.initial_seed(),
        "placements": {name: str(getattr(p, "placements", "")) for name, p in net.named_parameters()},
        "elements": {name: getattr(p, "to_local", lambda p=p: p)().numel() for name, p in net.named_parameters()},
    }
    return {**found, "results": steps(net, optimizer, range(20))}


def check(ranks: list[dict[str, Any]], kind: str) -> None:
    seeds = [seen["seed"] for seen in ranks]
    assert seeds[0] == SEED
    assert len({*seeds}) == len(seeds)
    for rank, seen in enumerate(ranks):
        assert not differing(seen["results"], alone(kind, 20)), f"rank {rank}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MAKERS)
def test_fsdp_is_as_one_process(two: Ranks, kind: str) -> None:
    ranks = two(_shared_out, "fsdp", kind)
    check(ranks, kind)
    assert [seen["elements"]["0.up.weight"] for seen in ranks] == [17 * 16, 16 * 16]
    assert [seen["elements"]["row"] for seen in ranks] == [3, 0]


@pytest.mark.parametrize("kind", ["AdamW", "E4M3", "SGD", "Quantized, copies"])
def test_tensor_parallelism_is_as_one_process(two: Ranks, kind: str) -> None:
    ranks = two(_shared_out, "tp", kind)
    check(ranks, kind)
    assert [seen["elements"]["0.up.weight"] for seen in ranks] == [17 * 16, 16 * 16]
    assert [seen["elements"]["0.down.weight"] for seen in ranks] == [16 * 17, 16 * 16]
    placements = ranks[0]["placements"]
    assert "Shard(dim=0)" in placements["0.up.weight"]
    assert "Shard(dim=1)" in placements["0.down.weight"]
    assert not placements["0.norm.weight"], "a plain tensor among distributed ones"


@pytest.mark.parametrize(("layout", "kind"), [("fsdp", "AdamW"), ("fsdp", "Kahan"), ("tp", "rounded states"), ("tp", "E4M3")])
def test_three_ranks_are_as_one_process(three: Ranks, layout: str, kind: str) -> None:
    ranks = three(_shared_out, layout, kind)
    check(ranks, kind)
    assert sum(seen["elements"]["row"] for seen in ranks) == (3 if layout == "fsdp" else 9)


@pytest.mark.parametrize("layout", ["hsdp", "fsdp over tp"])
def test_meshes_of_which_one_dimension_is_one_are_as_one_process(two: Ranks, layout: str) -> None:
    check(two(_shared_out, layout, "rounded states"), "rounded states")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("hsdp", "AdamW"),
        ("hsdp", "SGD, Kahan"),
        *[("fsdp over tp", kind) for kind in ("AdamW", "E4M3", "Quantized AdamW", "Quantized, copies")],
    ],
)
def test_meshes_of_two_dimensions_are_as_one_process(four: Ranks, layout: str, kind: str) -> None:
    ranks = four(_shared_out, layout, kind)
    check(ranks, kind)
    placements = ranks[0]["placements"]
    if layout == "hsdp":
        assert "Replicate()" in placements["0.up.weight"]
    else:
        assert "_StridedShard(" in placements["0.up.weight"]
        assert "Shard(dim=0), Shard(dim=1)" in placements["0.down.weight"]


# The results compared above depend on the seed.


@pytest.mark.parametrize("kind", MAKERS)
def test_weights_are_drawn(kind: str) -> None:
    drawn = {"seed 1", "0.down.weight"} if kind == "groups" else {"seed 0", "0.up.weight", "0.down.weight"}
    assert drawn <= {*differing(alone(kind, 3), alone(kind, 3, seed=2))}


@pytest.mark.parametrize(
    ("kind", "state"),
    [("rounded states", "max_exp_avg_sq"), ("Kahan", "exp_avg_sq"), ("E4M3", "exp_avg"), ("SGD, Kahan", "momentum_buffer")],
)
def test_states_are_drawn(kind: str, state: str) -> None:
    assert f"0.up.weight {state}" in differing(alone(kind, 3), alone(kind, 3, seed=2))


def _refused(device: torch.device, case: str) -> tuple[str, list[float]]:
    """The error of a step whose second group is unsupported, and the first group after it."""
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh, values = mesh_of(device), torch.ones(2, 2, device=device)
    first, second = nn.Parameter(torch.ones(2, device=device)), nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    if case == "summands":
        second = nn.Parameter(DTensor.from_local(values, mesh, [Partial()], run_check=False))
    optimizer = SGD([{"params": [first]}, {"params": [second]}], 1.0, seed=0)
    first.grad, second.grad = first.detach().clone(), values if case == "plain gradient" else second.detach().clone()
    with pytest.raises((TypeError, ValueError)) as caught:
        optimizer.step()
    return f"{type(caught.value).__name__}: {caught.value}", first.tolist()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("summands", "ValueError: summands of a tensor have no place in it: redistribute it first"),
        ("plain gradient", "TypeError: the gradient of parameter 1 is a plain tensor, the parameter a distributed one"),
    ],
)
def test_unsupported_tensors_raise_an_error_before_anything_is_updated(two: Ranks, case: str, words: str) -> None:
    for said, first in two(_refused, case):
        assert said.startswith(words)
        assert first == [1.0, 1.0]


# Replicas.


def _replicas(device: torch.device, kind: str, steps: int, seed: int | None) -> dict[str, Any]:
    net = net_of(device)
    net.row.requires_grad_(False)
    replica = nn.parallel.DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = MAKERS[kind](p for p in net.parameters() if p.requires_grad)
    for group in optimizer.param_groups if seed is not None else ():
        group["seed"] = seed + distributed.get_rank()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = replica(torch.randn(4, 16, device=device, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return {"results": results(net, optimizer), "losses": torch.stack(losses)}


@pytest.mark.parametrize("kind", ["AdamW", "Kahan", "SGD", "Quantized AdamW", "Quantized, copies"])
def test_replicas_do_not_drift(two: Ranks, kind: str) -> None:
    first, second = two(_replicas, kind, 100, None)
    assert not torch.equal(first["losses"], second["losses"]), "each has data of its own"
    assert first["losses"].isfinite().all()
    assert not differing(first["results"], second["results"])


def test_replicas_with_different_seeds_drift(two: Ranks) -> None:
    """This shows that the test above would detect it."""
    first, second = two(_replicas, "AdamW", 5, 1)
    assert "0.up.weight" in differing(first["results"], second["results"])
