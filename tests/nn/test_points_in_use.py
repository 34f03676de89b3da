"""A user's function and a user's module at each of the five points: eager, compiled, saved, resumed, sharded, captured and observed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint
from qsim.nn.product.outside import first_point
from support.comparing import same_bits
from support.cuda_graphs import captured
from support.distributed_models import mesh_of, whole
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

two = ranks_of(2)
NAMES = ("act", "weight", "act_bwd", "weight_bwd", "grad")
each_point = pytest.mark.parametrize("name", NAMES)


class Steps(nn.Module):
    """Rounds to multiples of a step that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor([0.125]))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x / self.step
        return (scaled + (scaled.round() - scaled).detach()) * self.step


KINDS: dict[str, Callable[[], Any]] = {"function": lambda: lambda x: (4 * x).round() / 4, "module": Steps}
each_kind = pytest.mark.parametrize("kind", KINDS)


def points(kind: str, name: str) -> FivePoint:
    """A user's rounding at one point; the gradient needs none of the others."""
    return FivePoint(**{name: KINDS[kind]()})


def model(kind: str, name: str, device: torch.device | str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    return qsim.convert(net, points(kind, name))


def batch(step: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(device)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, device: torch.device | str = "cpu") -> None:
    for step in steps:
        optimizer.zero_grad()
        net(batch(step, device)).square().mean().backward()
        optimizer.step()


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), 1e-2)


def results(call: Callable[[Tensor], Tensor], net: nn.Module) -> list[Tensor]:
    """The result of a step, and all gradients."""
    net.zero_grad()
    x = batch(0).requires_grad_()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]  # type: ignore[list-item]


def equal(one: Iterator[Tensor] | list[Tensor], other: Iterator[Tensor] | list[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


@each_point
@each_kind
def test_each_product_gets_what_the_point_returns(kind: str, name: str) -> None:
    layer, x, g = qsim.nn.Linear(8, 4, points=points(kind, name)), batch(0).requires_grad_(), torch.randn(16, 4)
    layer(x).backward(g)
    w, own = layer.weight.detach(), KINDS[kind]()

    def at(point: str, value: Tensor, forward: str = "") -> Tensor:
        return own(value).detach() if name in (point, forward) else value

    def passed(point: str, value: Tensor, gradient: Tensor) -> Tensor:
        """The gradient through a module's own rounding; that of a function is straight through."""
        leaf = value.detach().clone().requires_grad_()
        return torch.autograd.grad(own(leaf), leaf, gradient)[0] if (kind, name) == ("module", point) else gradient

    upstream = at("grad", g)
    torch.testing.assert_close(layer(x), at("act", x.detach()) @ at("weight", w).t() + layer.bias)
    torch.testing.assert_close(x.grad, passed("act", x, upstream @ at("weight_bwd", w, "weight")))
    torch.testing.assert_close(layer.weight.grad, passed("weight", w, upstream.t() @ at("act_bwd", x.detach(), "act")))


@pytest.mark.sampled(12)
@each_point
@each_kind
def test_compiled(kind: str, name: str) -> None:
    net = model(kind, name)
    torch._dynamo.reset()
    assert equal(results(torch.compile(net, fullgraph=True, backend="aot_eager"), net), results(net, net))


@each_point
@each_kind
def test_saved_and_resumed(kind: str, name: str, tmp_path: Path) -> None:
    net = model(kind, name)
    optimizer = adam(net)
    train(net, optimizer, range(2))
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    train(net, optimizer, range(2, 4))
    resumed = model(kind, name)
    other, state = adam(resumed), torch.load(tmp_path / "state.pt")
    resumed.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    train(resumed, other, range(2, 4))
    assert equal(net.parameters(), resumed.parameters())
    assert (f"0.{name}_point.step" in state["model"]) == (kind == "module")


@each_point
@each_kind
def test_observed(kind: str, name: str) -> None:
    net, x = model(kind, name), batch(0).requires_grad_()
    with qsim.diagnostics.Monitor(net) as monitor:
        net(x).sum().backward()
        monitor.step()
    expected = {"function": "<lambda>", "module": "Steps"}[kind]
    assert {(counts.layer, counts.point, counts.quantizer) for counts in monitor.samples[0]} >= {(i, name, expected) for i in "02"}
    products = qsim.coverage(net, x).filter(module="0")
    assert f"{name}={expected}" in {point for product in products for point in product.points}


def _trained(device: torch.device, kind: str, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after three steps, sharded and in one process."""
    from torch.distributed.fsdp import fully_shard

    alone, sharded = model(kind, name, device), model(kind, name, device)
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh_of(device))
    for net in (alone, sharded):
        train(net, torch.optim.SGD(net.parameters(), 2.0**-4), range(3), device)
    return [whole(p.detach()) for p in sharded.parameters()], [p.detach() for p in alone.parameters()]


@NEEDS_GLOO
@each_kind
def test_fully_sharded(two: Ranks, kind: str) -> None:
    for name in NAMES:
        for sharded, alone in two(_trained, kind, name):
            assert len(sharded) == len(alone) == (6 if kind == "module" else 4)
            # Both ranks have the same batch, so that the mean of their gradients is the gradient of each.
            assert equal(sharded, alone), name


Run = tuple[nn.Module, torch.optim.Optimizer]


def _run(kind: str, name: str, device: torch.device, shard: bool) -> Run:
    """A model, sharded or whole, and an optimizer with momentum, whose factors are powers of two: shards step to the same bits."""
    from torch.distributed.fsdp import fully_shard

    net = model(kind, name, device)
    for layer in (net[0], net[2], net) if shard else ():
        fully_shard(layer, mesh=mesh_of(device))
    return net, torch.optim.SGD(net.parameters(), 2.0**-4, momentum=0.5)


def _loaded(run: Run, folder: str) -> Run:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    state = dict(zip(("model", "optimizer"), get_state_dict(*run), strict=True))
    # A backward point's parameter has no gradient, so that the checkpoint has no momentum for it.
    planner = checkpoint.DefaultLoadPlanner(allow_partial_load=True)
    checkpoint.load(state, checkpoint_id=folder, planner=planner)
    set_state_dict(*run, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return run


def _resumed(device: torch.device, kind: str, name: str, folder: str) -> tuple[list[str], list[list[Tensor]]]:
    """The keys of a checkpoint of a sharded run, and the ends of runs: of one process, sharded, and resumed on shards and as a whole."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    alone, sharded = _run(kind, name, device, shard=False), _run(kind, name, device, shard=True)
    for run in (alone, sharded):
        train(*run, range(2), device)
    state = dict(zip(("model", "optimizer"), get_state_dict(*sharded), strict=True))
    checkpoint.save(state, checkpoint_id=folder)
    runs = [alone, sharded, *(_loaded(_run(kind, name, device, shard), folder) for shard in (True, False))]
    for run in runs:
        train(*run, range(2, 4), device)
    return list(state["model"]), [[whole(p.detach()) for p in net.parameters()] for net, _ in runs]


@NEEDS_GLOO
@pytest.mark.slow
@each_point
@each_kind
def test_resumed_from_a_checkpoint_of_shards(two: Ranks, kind: str, name: str, tmp_path: Path) -> None:
    for keys, (alone, *others) in two(_resumed, kind, name, str(tmp_path)):
        assert (f"2.{name}_point.step" in keys) == (kind == "module")
        assert all(equal(alone, other) for other in others)


def _compiled(device: torch.device, kind: str, name: str) -> list[list[Tensor]]:
    """Parameters after two steps, of a model in one process and of a sharded one whose layers are compiled."""
    runs = [_run(kind, name, device, shard) for shard in (False, True)]
    torch._dynamo.reset()
    for layer in (runs[1][0][0], runs[1][0][2]):  # type: ignore[index]
        layer.compile(fullgraph=True, backend="aot_eager")
    for run in runs:
        train(*run, range(2), device)
    return [[whole(p.detach()) for p in net.parameters()] for net, _ in runs]


@NEEDS_GLOO
@pytest.mark.slow
@each_point
@each_kind
def test_compiled_shards(two: Ranks, kind: str, name: str) -> None:
    for alone, sharded in two(_compiled, kind, name):
        assert equal(alone, sharded)


@pytest.mark.gpu
@each_point
@each_kind
def test_captured_by_a_cuda_graph(kind: str, name: str) -> None:
    net, x = model(kind, name, "cuda"), batch(0, "cuda")

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(net(x).square().sum(), [net[0].weight, net[2].weight]))

    graph, replayed = captured(gradients)
    x.copy_(batch(1, "cuda"))
    graph.replay()
    assert equal(replayed, gradients())


@each_kind
@pytest.mark.parametrize("name", ["act", "weight", "grad"])
def test_a_chips_unit_names_the_point_whose_values_it_cannot_take(kind: str, name: str) -> None:
    given: dict[str, Any] = {"act": "e4m3", "weight": "e4m3", "grad": "e5m2", name: KINDS[kind]()}
    words = (
        rf"h100_fp8 in .*: {name} \({'<lambda>' if kind == 'function' else 'Steps'}\): the unit takes operands in e4m3 or e5m2, got fp32"
    )
    with pytest.raises(ValueError, match=words):
        qsim.nn.functional.linear(batch(0), torch.randn(4, 8), points=FivePoint(**given, accumulate="h100_fp8", chip="require"))


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ({"act": lambda x: x}, "the point bias"),
        ({"act": qsim.points.PACT()}, "act: PACT, with a gradient of its own,"),
        ({"weight": qsim.points.LSQ("int4")}, "weight: LSQ, with a gradient of its own,"),
        ({"output": "e4m3"}, "the point output"),
    ],
)
def test_errors_name_the_first_point_that_rounds_outside_of_a_product(points: dict[str, Any], words: str) -> None:
    assert first_point(FivePoint(**points, bias="e4m3")) == words
