"""Rounding on FSDP2's wires: processes and virtual ranks agree in every bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from qsim import Quantizer, scaling
from qsim.distributed import AllReduce, FSDPWire, reduce_scatter, simulate_reduce_scatter
from qsim.distributed.messages import ALGORITHMS, scattering
from support.comparing import same_bits
from support.distributed_models import TensorParallelBlock, coarse, model
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

SIZE, STEPS, RATE = 3, 3, 2.0**-8
three = ranks_of(SIZE)
#: Rows of 33 and 16 are sharded unevenly.
WIRES = [
    lambda: FSDPWire(Quantizer("e4m3", scale=scaling.PerBlock(8)), AllReduce("ring", wire="bf16"), seed=3),
    lambda: FSDPWire(
        Quantizer("e4m3", "stochastic", scale="tensor"),
        AllReduce("tree", wire=Quantizer("e5m2", "stochastic"), sums=Quantizer("bf16", "stochastic")),
    ),
    lambda: FSDPWire("nvfp4", AllReduce("all_to_all", wire="e4m3", error_feedback=True)),
    lambda: FSDPWire(gradients=AllReduce("tree", sums="bf16")),
]


def inputs(rank: int, step: int) -> Tensor:
    return coarse(4, 16, seed=10 * step + rank)


def loss(net: Any, x: Tensor) -> Tensor:
    found: Tensor = net(x).square().mean()
    return found


def _trained(device: torch.device) -> list[list[dict[str, Tensor]]]:
    """The parameters after each step, for each wire."""
    from torch.distributed.fsdp import fully_shard

    mesh, found = init_device_mesh(device.type, (SIZE,)), []
    for make in WIRES:
        net, wire = model(device), make()
        for module in (net[0].up, net[1], net):
            fully_shard(module, mesh=mesh)
        wire.attach(net)
        optimizer = torch.optim.SGD(net.parameters(), RATE)
        found.append([])
        for step in range(STEPS):
            if step == 2:  # resumed
                saved, wire = wire.state_dict(), make()
                wire.attach(net)
                wire.load_state_dict(saved)
            optimizer.zero_grad()
            loss(net, inputs(distributed.get_rank(), step).to(device)).backward()
            optimizer.step()
            parameters: Mapping[str, Any] = dict(net.named_parameters())
            found[-1].append({name: x.full_tensor().detach().cpu() for name, x in parameters.items()})
    return found


def _slices(parameters: list[Tensor]) -> Tensor:
    """Tensors in the order in which FSDP2 sends them: for each rank a shard of each, with zeros where there are too few rows."""
    padded = [nn.functional.pad(x.flatten(1) if x.dim() > 1 else x.unsqueeze(1), (0, 0, 0, -len(x) % SIZE)) for x in parameters]
    return torch.cat([x.chunk(SIZE)[rank].flatten() for rank in range(SIZE) for x in padded])


def _from_slices(chunks: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    sizes = [-(-len(x) // SIZE) * x[0].numel() for x in parameters]
    shards = [chunk.split(sizes) for chunk in chunks]
    return [torch.cat([own[i] for own in shards])[: x.numel()].view(x.shape) for i, x in enumerate(parameters)]


def _simulated(wire: FSDPWire) -> list[dict[str, Tensor]]:
    """The same training in one process."""
    net, found = model(torch.device("cpu")), []
    weights = {name: x.detach().clone() for name, x in net.named_parameters()}
    groups = {"0.up": ["0.up."], "1": ["1."], "": ["0.norm.", "0.down."]}
    residuals: dict[str, list[Tensor]] = {}
    assert wire.gradients is not None
    for step in range(STEPS):
        rounded = {name: wire.gathered(name, x, step).requires_grad_() for name, x in weights.items()}
        gradients = []
        for rank in range(SIZE):
            value = loss(lambda x, own=rounded: torch.func.functional_call(net, own, (x,)), inputs(rank, step))
            gradients.append(dict(zip(rounded, torch.autograd.grad(value, list(rounded.values())), strict=True)))
        for group, prefixes in groups.items():
            names = [name for prefix in prefixes for name in weights if name.startswith(prefix)]
            tensors = [_slices([own[name] for name in names]) / SIZE for own in gradients]
            if wire.gradients.error_feedback:
                residuals.setdefault(group, [torch.zeros(x.numel()) for x in tensors])
            chunks = simulate_reduce_scatter(tensors, wire.gradients, seed=wire.seed_of(group, step), residuals=residuals.get(group))
            for name, gradient in zip(names, _from_slices(chunks, [weights[name] for name in names]), strict=True):
                weights[name] = weights[name] - RATE * gradient
        found.append(dict(weights))
    return found


@NEEDS_GLOO
def test_fsdp_and_virtual_ranks_agree_in_every_bit(three: Ranks) -> None:
    ranks = three(_trained)
    plain = _simulated(FSDPWire(gradients=AllReduce("all_to_all")))
    for number, make in enumerate(WIRES):
        expected = _simulated(make())
        for step in range(STEPS):
            for name, x in expected[step].items():
                assert all(same_bits(own[number][step][name], x) for own in ranks), (number, step, name)
        assert not any(same_bits(x, plain[-1][name]) for name, x in expected[-1].items()), "every parameter feels its wire"


def _gathered(device: torch.device) -> list[dict[str, Tensor]]:
    """The weights that the layers get, for each of several points, with and without mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, found = init_device_mesh(device.type, (SIZE,)), []
    for point in POINTS:
        for dtype in (None, torch.bfloat16):
            net = model(device, hidden=96)[0]
            fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            FSDPWire(point, seed=1).attach(net)
            seen: dict[str, Tensor] = {}
            handle = net.down.register_forward_hook(
                lambda layer, args, out, seen=seen: seen.update(weight=layer.weight.detach().clone(), bias=layer.bias.detach().clone())
            )
            net(inputs(0, 0).to(device))
            handle.remove()
            found.append(seen)
    return found


POINTS = [
    Quantizer("e4m3"),
    Quantizer("e4m3", "stochastic", scale=scaling.PerRow()),
    Quantizer("e2m1", scale=scaling.PerTile(2, 4)),
    Quantizer("e4m3", scale=scaling.PerTensor("e8m0", "ceil")),
    Quantizer("e4m3", "stochastic", scale=scaling.PerBlock(16, format="e4m3", outer=scaling.PerTensor())),
    Quantizer("int8", scale="row", transform="Hadamard(16)"),
]


@NEEDS_GLOO
def test_gathered_weights_are_those_of_one_process(three: Ranks) -> None:
    ranks = three(_gathered)
    layer = model(torch.device("cpu"), hidden=96)[0].down
    weight = layer.weight.detach()
    for number, point in enumerate(POINTS):
        expected = FSDPWire(point, seed=1).gathered("down.weight", weight)
        assert not same_bits(expected, weight)
        if not point.rounding.is_stochastic:
            torch.testing.assert_close(expected, point(weight), rtol=1e-6, atol=0)
        for own in ranks:
            single, half = own[2 * number : 2 * number + 2]
            assert same_bits(single["weight"], expected)
            assert same_bits(half["weight"], expected.bfloat16())
            assert same_bits(single["bias"], layer.bias)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_rank_gets_the_sum_of_its_chunk(algorithm: str, size: int) -> None:
    held = [[{rank} for _ in range(size)] for rank in range(size)]
    for messages in scattering(algorithm, size):
        assert len({m.sender for m in messages}) == len({m.receiver for m in messages}) == len(messages)
        for m, ranks in [(m, set(held[m.sender][m.chunk])) for m in messages]:
            assert not held[m.receiver][m.chunk] & ranks
            held[m.receiver][m.chunk] |= ranks
    assert all(held[rank][rank] == set(range(size)) for rank in range(size))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_finished_sum_is_not_sent(algorithm: Any) -> None:
    """One rounding fewer than in an all-reduce."""
    ranks = list(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.cat(simulate_reduce_scatter([torch.arange(8.0)] * 4, AllReduce(algorithm))), 4 * torch.arange(8.0))
    how = AllReduce(algorithm, wire=Quantizer("e4m3", "stochastic"))
    found = torch.cat(simulate_reduce_scatter(ranks, how, seed=1))
    assert not same_bits(Quantizer("e4m3")(found), found)
    residuals = [torch.zeros(8) for _ in range(4)]
    fed = torch.cat(simulate_reduce_scatter(ranks, AllReduce(algorithm, wire="e4m3", error_feedback=True), residuals=residuals))
    torch.testing.assert_close(fed + sum(residuals, torch.zeros(8)), sum(ranks, torch.zeros(8)))


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TensorParallelBlock()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: FSDPWire("e4m3", "ring"), TypeError, "FSDPWire: how must be a qsim.distributed.AllReduce, got 'ring'"),  # type: ignore[arg-type]
        (lambda: FSDPWire(Quantizer("e4m3", scale=scaling.PerBlock(8, dim=0))), ValueError, "a rank has rows of a weight: give 'tensor'"),
        (lambda: FSDPWire(Quantizer("e4m3", scale="delayed")), ValueError, r"or Given\(value\), got scale=Delayed"),
        (lambda: FSDPWire("e4m3").attach(Scalar()), TypeError, "attach needs a model that fully_shard has sharded, got Scalar"),
        (lambda: FSDPWire("e4m3").load_state_dict({"groups": {"0": {}}}), ValueError, "the state has the sharded modules '0', and"),
        (lambda: simulate_reduce_scatter([torch.ones(3)] * 2, AllReduce()), ValueError, "2 ranks get equal chunks, and a tensor of 3"),
        (lambda: simulate_reduce_scatter([], AllReduce()), ValueError, "simulate_reduce_scatter: there must be a tensor for each rank"),
        (lambda: simulate_reduce_scatter([torch.ones(2)], "ring"), TypeError, "simulate_reduce_scatter: how must be a"),  # type: ignore[arg-type]
        (lambda: reduce_scatter(torch.ones(2), AllReduce()), RuntimeError, "simulate_reduce_scatter adds the tensors of virtual ranks"),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def _refused(device: torch.device) -> list[str]:
    """The errors of models whose shards cannot be rounded like the whole, in all processes."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh, said = init_device_mesh(device.type, (SIZE,)), []

    def message(point: Quantizer, *modules: int, **options: Any) -> None:
        net = model(device)
        fully_shard([net[i] for i in modules], mesh=mesh, **options)
        if len(modules) > 1:
            fully_shard(net, mesh=mesh)
        try:
            FSDPWire(point).attach(net)
            net(inputs(0, 0).to(device))
        except (ValueError, RuntimeError) as error:
            said.append(str(error))

    message(Quantizer("e4m3", scale=scaling.PerTile(16, 16)), 0)
    message(Quantizer("e4m3"), 0, shard_placement_fn=lambda x: Shard(1) if x.dim() == 2 and not x.shape[1] % SIZE else Shard(0))
    message(Quantizer("e4m3"), 0, 1)
    return said


@NEEDS_GLOO
def test_shards_that_cannot_be_rounded_are_refused(three: Ranks) -> None:
    for tiles, columns, several in three(_refused):
        assert tiles == "FSDPWire: 0.up.weight: tiles have 16 rows and shards 11: each shard must hold whole tiles"
        assert columns.startswith(
            "FSDPWire: 0.down.weight must be sharded along its first dimension, on a mesh with one dimension, got (Shard("
        )
        assert "fully_shard with several modules at once" in several
