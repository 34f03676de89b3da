"""Tensor-parallel plans: their layers compute the same as the whole layers, converted before or after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import qsim
from qsim import FivePoint
from support.comparing import same_bits
from support.distributed_models import (
    NEAREST,
    NOISY,
    REUSED,
    SATURATED,
    alike,
    check,
    coarse,
    doubled,
    gradients,
    mesh_of,
    model,
    noisy,
    parallelized,
    place,
    rounded_alike,
    run,
)
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO

two = ranks_of(2)


def _tensor_parallel(device: torch.device, sequence: bool, convert_last: bool) -> dict[str, Any]:
    mesh = mesh_of(device)
    reference = model(device, NEAREST, 36)
    net = parallelized(model(device, None if convert_last else NEAREST, 36), mesh, sequence)
    if convert_last:
        qsim.convert(net, NEAREST)
    x = coarse(3, 8, 16, seed=1).to(device)
    names = [name for name, _ in net.named_parameters()]
    placed = {name: str(parameter.placements) for name, parameter in net.named_parameters() if hasattr(parameter, "placements")}
    results = [run(each, x, 0) for each in (net, reference)]
    return {"results": results, "names": names, "placed": placed, "gradients": [gradients(net), gradients(reference)]}


@pytest.mark.parametrize(("sequence", "convert_last"), [(False, False), (False, True), (True, False)])
def test_tensor_parallel_plans(two: Ranks, sequence: bool, convert_last: bool) -> None:
    for seen in two(_tensor_parallel, sequence, convert_last):
        assert "Shard(dim=0)" in seen["placed"]["0.up.weight"]
        assert "Shard(dim=1)" in seen["placed"]["0.down.weight"]
        y, expected = seen["results"]
        assert same_bits(y, expected)
        for name, found, wanted in zip(seen["names"], *seen["gradients"], strict=True):
            check(name, found, wanted)


def _compiled(device: torch.device, points: FivePoint) -> list[list[Tensor]]:
    results = []
    for compiled in (True, False):
        torch.manual_seed(distributed.get_rank())  # each conversion draws a seed; rank 0's counts
        net = parallelized(model(device, points, 36)[:1], mesh_of(device), sequence=False)
        call = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
        results.append([run(call, coarse(4, 16, seed=1).to(device), 0), *gradients(net)])
    return results


def test_a_plan_compiles(two: Ranks) -> None:
    for found, expected in two(_compiled, REUSED):
        assert len(found) == len(expected) == 7
        assert same_bits(found[0], expected[0])
        for gradient, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, wanted)


def _doubled(device: torch.device, compiled: bool) -> list[Tensor]:
    layer = doubled(device, mesh_of(device))
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    return [call(torch.full((4, 16), 1.25, device=device)) for _ in range(2)]


@pytest.mark.parametrize("compiled", [False, True])
def test_an_input_that_all_ranks_hold_rounds_alike_on_all(two: Ranks, compiled: bool) -> None:
    for first, second in two(_doubled, compiled):
        assert rounded_alike(first)
        assert rounded_alike(second)
        assert not same_bits(first, second), "every call draws again"


def _replicated_layer(device: torch.device) -> list[Tensor]:
    """A layer outside of the plan, which gets its whole input."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    mesh = mesh_of(device)
    layer = qsim.convert(nn.Linear(16, 16).to(device), NOISY)
    distribute_module(
        layer,
        mesh,
        input_fn=lambda _, inputs, mesh: tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs),
        output_fn=lambda _, output, mesh: output.to_local(),
    )
    y = run(layer, coarse(4, 16, seed=1).to(device), distributed.get_rank())
    return [y, *gradients(layer)]


def test_a_replicated_layer_rounds_alike_on_all_ranks(two: Ranks) -> None:
    first, second = two(_replicated_layer)
    assert alike(first, second)


def _embedding_in_a_plan(device: torch.device, convert_last: bool) -> list[list[Tensor]]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    points = FivePoint(act="e2m1", weight=noisy("e2m1"), weight_bwd="same", act_bwd="same", grad=SATURATED)
    results = []
    for styled in (True, False):
        torch.manual_seed(distributed.get_rank())  # the conversion draws a seed; rank 0's counts
        net = nn.Sequential(nn.Embedding(14, 8), nn.Linear(8, 14)).to(device)
        with torch.no_grad():
            for i, parameter in enumerate(net.parameters()):
                parameter.copy_(coarse(*parameter.shape, seed=i))
        net = net if convert_last else qsim.convert(net, points, embeddings=True)
        if styled:
            gathered = ColwiseParallel(output_layouts=place("all"))
            parallelize_module(net, mesh_of(device), {"0": RowwiseParallel(input_layouts=place("all")), "1": gathered})
        net = qsim.convert(net, points, embeddings=True) if convert_last else net
        x = torch.arange(12, device=device).view(3, 4)
        results.append([run(net, x, 0), *gradients(net)])
    return results


@pytest.mark.parametrize("convert_last", [False, True])
def test_an_embedding_in_a_plan(two: Ranks, convert_last: bool) -> None:
    for found, expected in two(_embedding_in_a_plan, convert_last):
        assert len(found) == 4
        assert alike(found, expected)
