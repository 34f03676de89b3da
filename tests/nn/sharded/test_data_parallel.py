"""Tests that converted models under data parallelism compute the same as in a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import qsim
from qsim import FivePoint, random
from support.comparing import same_bits
from support.distributed_models import (
    NEAREST,
    NOISY,
    REUSED,
    SATURATED,
    alike,
    check,
    coarse,
    converted,
    doubled,
    gradients,
    mesh_of,
    model,
    noisy,
    parallelized,
    rounded_alike,
    run,
    whole,
)
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO
two, four = ranks_of(2), ranks_of(4)


#: Products whose sums are rounded, with noise.
SUMMED = FivePoint(
    "e2m1", noisy("e2m1"), act_bwd="same", weight_bwd="same", grad=SATURATED, accumulate="Rounded('e6m9', rounding='stochastic')"
)


def mean(grads: list[list[Tensor]]) -> list[Tensor]:
    """The mean over ranks."""
    return [sum(parts[1:], parts[0]) / len(parts) for parts in zip(*grads, strict=True)]


def rounded_weights(net: nn.Module) -> list[Tensor]:
    """The weights in forward products."""
    layers = [layer for layer in net.modules() if isinstance(layer, qsim.nn.Linear)]
    points = FivePoint(weight=noisy("e2m1"), weight_bwd=None)
    eye = (torch.eye(layer.in_features, device=layer.weight.device) for layer in layers)
    return [qsim.nn.functional.linear(a, layer.weight, None, points, stream=layer.stream) for a, layer in zip(eye, layers, strict=True)]


# Data parallelism.


def _ddp(device: torch.device, seed_alike: bool, points: FivePoint) -> dict[str, Any]:
    rank = distributed.get_rank()
    net, alone = model(device, points), model(device, points)
    ids = [device.index] if device.type == "cuda" else None
    replica = nn.parallel.DistributedDataParallel(net, device_ids=ids)
    with pytest.raises(ValueError, match=r"coverage: the model is wrapped in DistributedDataParallel, .*: give model.module"):
        qsim.coverage(replica, coarse(8, 16, seed=rank).to(device))
    optimizer = torch.optim.SGD(net.parameters(), 2.0**-6)
    seen: dict[str, Any] = {"weights": [], "own": [], "reduced": []}
    for step in range(3):
        x = coarse(8, 16, seed=10 * step + rank).to(device)
        seen["weights"].append(rounded_weights(net))
        alone.load_state_dict(net.state_dict())
        alone.zero_grad()
        optimizer.zero_grad()
        seed = step if seed_alike else 2 * step + rank
        run(alone, x, seed, rank)
        run(replica, x, seed, rank)
        seen["own"].append(gradients(alone))
        seen["reduced"].append(gradients(net))
        optimizer.step()
    seen["parameters"] = list(net.parameters())
    seen["shared seed"] = random.shared_seed()
    torch.manual_seed(0)
    x = torch.full((4, 16), 1.25, device=device)
    seen["input"] = qsim.nn.functional.linear(x, torch.eye(16, device=device), points=FivePoint(act=noisy("e2m1"), act_bwd=None))
    return seen


@pytest.mark.parametrize(("seed_alike", "points"), [(True, NOISY), (False, NOISY), (False, SUMMED)], ids=["alike", "apart", "summed"])
def test_ddp(two: Ranks, seed_alike: bool, points: FivePoint) -> None:
    first, second = two(_ddp, seed_alike, points)
    assert first["shared seed"] == second["shared seed"]
    for step in range(3):
        assert alike(first["weights"][step], second["weights"][step]), "replicas round weights alike"
        assert alike(first["reduced"][step], second["reduced"][step])
        assert alike(first["reduced"][step], mean([first["own"][step], second["own"][step]]))
        assert not any(map(same_bits, first["own"][step], second["own"][step]))
    assert not any(map(same_bits, first["weights"][0], first["weights"][1])), "they are drawn again after a step"
    assert alike(first["parameters"], second["parameters"])
    assert set(first["input"].unique().tolist()) == {1.0, 1.5}
    assert not same_bits(first["input"], second["input"]), "inputs are rounded with noise of each rank's own"


# FSDP2.

ORDERS = ["converted first", "converted last", "every layer sharded, converted last"]


def _fully_sharded(
    device: torch.device, points: FivePoint, order: str, dtype: torch.dtype | None, checkpointing: bool
) -> tuple[nn.Module, nn.Module]:
    """A model under FSDP2, and the same model unsharded."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = mesh_of(device)
    reference = model(device, points)
    net = model(device, points if order == "converted first" else None)
    if checkpointing:
        for i in range(len(net)):
            net[i] = checkpoint_wrapper(net[i])
            reference[i] = checkpoint_wrapper(reference[i])
    # By default, FSDP2 sums gradients in their own dtype before torch 2.15, and in that of the parameter from then on.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for module in net.modules():
        if "every layer" in order and isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    for block in net:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if order != "converted first":
        # With the layer names that they have without checkpointing, which determine their streams.
        converted(net, points)
    return net, reference if dtype is None else reference.to(dtype)


def _fsdp(device: torch.device, *options: Any) -> dict[str, Any]:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    net, reference = _fully_sharded(device, *options)
    optimizers = [torch.optim.SGD(x.parameters(), 2.0**-6) for x in (net, reference)]
    dtype = next(reference.parameters()).dtype
    seen: dict[str, Any] = {"kinds": [isinstance(m, qsim.nn.Linear) for m in net.modules() if isinstance(m, nn.Linear)], "steps": []}
    for step in range(2):
        x = coarse(8, 16, seed=10 * step + rank).to(device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        pair = run(net, x, step, rank), run(reference, x.to(dtype), step, rank)
        own = gradients(reference)
        reduced = [gradient.float() for gradient in gradients(net)]
        averaged = []
        for parameter, gradient in zip(reference.parameters(), own, strict=True):
            halved = gradient / size
            distributed.all_reduce(halved)
            parameter.grad = halved
            averaged.append(halved.float())
        seen["steps"].append((*pair, reduced, averaged))
        for optimizer in optimizers:
            optimizer.step()
    seen["parameters"] = [[whole(parameter) for parameter in x.parameters()] for x in (net, reference)]
    return seen


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("points", [NOISY, REUSED, SUMMED], ids=["noisy", "reused", "summed"])
def test_fsdp(two: Ranks, order: str, points: FivePoint) -> None:
    for seen in two(_fsdp, points, order, None, False):
        assert seen["kinds"] == [True] * 4
        for y, expected, reduced, averaged in seen["steps"]:
            assert same_bits(y, expected)
            assert alike(reduced, averaged)
        assert alike(*seen["parameters"])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fsdp_in_bfloat16(two: Ranks, checkpointing: bool) -> None:
    for seen in two(_fsdp, NOISY, ORDERS[0], torch.bfloat16, checkpointing):
        for y, expected, reduced, averaged in seen["steps"][:1]:
            assert y.dtype == torch.bfloat16
            assert same_bits(y, expected)
            assert alike(reduced, averaged)


def test_fsdp_with_activation_checkpointing(two: Ranks) -> None:
    for seen in two(_fsdp, NOISY, ORDERS[0], None, True):
        for y, expected, reduced, averaged in seen["steps"]:
            assert same_bits(y, expected)
            assert alike(reduced, averaged)


def _reverted(device: torch.device) -> tuple[list[str], Tensor, Tensor]:
    net, _ = _fully_sharded(device, NEAREST, ORDERS[2], None, False)
    x = coarse(4, 16, seed=1).to(device)
    qsim.revert(net)
    return [type(module).__name__ for module in net.modules()], net(x), model(device)(x)


def test_models_that_fsdp_shards_can_be_reverted(two: Ranks) -> None:
    for names, y, expected in two(_reverted):
        assert names.count("FSDPLinear") == 4
        torch.testing.assert_close(y, expected)


class _Calls(nn.Module):
    """A module that multiplies by parts of its own parameter, by a layer's weight and by a table."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.layer, self.table = nn.Parameter(torch.randn(3, 8, 8)), nn.Linear(8, 8), nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.stack([nn.functional.linear(x, weight) for weight in self.stack]).sum(0)
        return nn.functional.linear(nn.functional.linear(self.layer(mixed), self.layer.weight), self.table.weight)


def _called(device: torch.device, order: str) -> list[bool]:
    from torch.distributed.fsdp import fully_shard

    points = FivePoint(act="e4m3", weight=noisy("e2m1"), act_bwd="same", weight_bwd="same", grad="e5m2")
    nets = []
    for sharded in (False, True):
        torch.manual_seed(0)
        net = _Calls().to(device)
        if sharded and order == ORDERS[1]:
            fully_shard(net, mesh=mesh_of(device))
        converted(net, points)
        if sharded and order == ORDERS[0]:
            fully_shard(net, mesh=mesh_of(device))
        nets.append(net)
    x = coarse(4, 8, seed=1).to(device)
    alone, own = (run(net, x, 2) for net in nets)
    same = all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*map(gradients, nets), strict=True))
    return [same_bits(own, alone), same]


@pytest.mark.parametrize("order", ORDERS[:2])
def test_calls_under_fsdp_round_as_in_one_process(two: Ranks, order: str) -> None:
    assert two(_called, order) == [[True, True]] * 2


def _saved(device: torch.device, folder: str) -> dict[str, Any]:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    net, reference = _fully_sharded(device, NOISY, ORDERS[0], None, False)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    checkpoint.save(get_model_state_dict(net), checkpoint_id=folder)
    fresh, _ = _fully_sharded(device, NOISY, ORDERS[1], None, False)
    state = get_model_state_dict(fresh)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(fresh, state)
    alone = model(device).state_dict()
    checkpoint.load(alone, checkpoint_id=folder)
    x = coarse(4, 16, seed=1).to(device)
    return {
        "keys": [list(state), list(reference.state_dict())],
        "saved": [whole(x) for x in net.parameters()],
        "loaded": [whole(x) for x in fresh.parameters()],
        "loaded alone": list(alone.values()),
        "results": [run(net, x, 1), run(fresh, x, 1)],
    }


def test_a_checkpoint_makes_a_round_trip(two: Ranks, tmp_path: Path) -> None:
    for seen in two(_saved, str(tmp_path)):
        assert seen["keys"][0] == seen["keys"][1]
        assert alike(seen["saved"], [3 * x for x in model(torch.device("cpu")).parameters()])
        assert alike(seen["saved"], seen["loaded"])
        assert alike(seen["saved"], seen["loaded alone"])
        assert same_bits(*seen["results"])


# Both combined.


def _two_dimensions(device: torch.device, points: FivePoint) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(device, 2, 2)
    row = mesh["data"].get_local_rank()
    reference = model(device, points, 36)
    net = parallelized(model(device, points, 36), mesh["tensor"], sequence=False)
    for block in net:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    optimizers = [torch.optim.SGD(x.parameters(), 2.0**-6) for x in (net, reference)]
    seen: dict[str, Any] = {"row": row, "steps": [], "names": [name for name, _ in reference.named_parameters()]}
    for step in range(2):
        x = coarse(4, 16, seed=10 * step + row).to(device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        # The first of the ranks that share a row of data has the same seed as a single process.
        seed = 2 + distributed.get_rank() % 2
        seen["steps"].append([run(net, x, seed, row), run(reference, x, 2, row)])
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
            distributed.all_reduce(parameter.grad, group=mesh["data"].get_group())
        for optimizer in optimizers:
            optimizer.step()
    seen["parameters"] = [[whole(parameter) for parameter in x.parameters()] for x in (net, reference)]
    torch.manual_seed(5 + distributed.get_rank() % 2)
    seen["input"] = doubled(device, mesh["tensor"])(torch.full((4, 16), 1.25, device=device))
    return seen


@pytest.mark.slow
def test_fsdp_and_tensor_parallelism_at_once(four: Ranks) -> None:
    for seen in four(_two_dimensions, NEAREST):
        for y, expected in seen["steps"]:
            assert same_bits(y, expected)
        for name, found, wanted in zip(seen["names"], *seen["parameters"], strict=True):
            check(name, found, wanted)


@pytest.mark.slow
def test_fsdp_and_tensor_parallelism_with_noise(four: Ranks) -> None:
    ranks = four(_two_dimensions, NOISY)
    assert [seen["row"] for seen in ranks] == [0, 0, 1, 1]
    for a, b in (ranks[:2], ranks[2:]):
        assert alike([y for y, _ in a["steps"]], [y for y, _ in b["steps"]]), "ranks that share data agree"
        assert rounded_alike(a["input"])
        assert same_bits(a["input"], b["input"])
    assert not same_bits(ranks[0]["input"], ranks[2]["input"]), "those that do not round inputs apart"
    assert all(alike(seen["parameters"][0], ranks[0]["parameters"][0]) for seen in ranks), "what all hold stays alike"


# Checkpoints.


def _saved_whole(device: torch.device, folder: str) -> dict[str, Any]:
    sharded, _ = _fully_sharded(device, NOISY, "converted first", None, False)
    run(sharded, coarse(8, 16, seed=0).to(device), 0, distributed.get_rank())  # ranks agree on the streams
    qsim.save(sharded, folder)
    with pytest.raises(TypeError, match=r"load: 0\.down\.bias is distributed: load the model first, then shard it"):
        qsim.load(sharded, folder)
    with pytest.raises(
        TypeError, match=r"export: the model is distributed: gather it first, with qsim.save on all ranks and qsim.load on one"
    ):
        qsim.export(sharded, f"{folder}/exported")
    streams = [layer.stream for layer in sharded.modules() if isinstance(layer, qsim.nn.Linear)]
    return {"parameters": [whole(parameter).detach() for parameter in sharded.parameters()], "streams": streams}


def test_a_sharded_model_is_saved_whole(two: Ranks, tmp_path: Path) -> None:
    first, second = two(_saved_whole, str(tmp_path / "saved"))
    assert first["streams"] == second["streams"]
    loaded = qsim.load(model(torch.device("cpu"), None), tmp_path / "saved")
    assert alike(list(loaded.parameters()), [parameter.cpu() for parameter in first["parameters"]])
    assert [layer.stream for layer in loaded.modules() if isinstance(layer, qsim.nn.Linear)] == first["streams"]
