"""Models compiled block by block: one graph for all equal blocks in every recipe, with the results of eager code if nothing is drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import qsim
from qsim import FivePoint, Quantizer
from support.points import in_order

pytestmark = pytest.mark.usefixtures("fresh_compiler")

#: A second block is enough to be compiled again, which is an error.
WIDTH, BLOCKS = 32, 2

RECIPES: dict[str, Any] = {
    "native": None,
    "e4m3": "e4m3",
    "fp8_hybrid": "fp8_hybrid",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "stochastic_backward": qsim.recipes.stochastic_backward("e4m1"),
    "stochastic everywhere": in_order(*[Quantizer("e4m3", "stochastic")] * 5),
}


class Block(nn.Module):
    """Attention and a perceptron, and a product of a module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + nn.functional.linear(nn.functional.gelu(self.up(self.norm(x))), self.down)


def net(recipe: Any, kind: type[Block] = Block, blocks: int = BLOCKS) -> nn.Sequential:
    """Equal blocks with different weights; the head stays in high precision."""
    torch.manual_seed(0)
    model = nn.Sequential(*[kind() for _ in range(blocks)], nn.Linear(WIDTH, 4))
    return model if recipe is None else qsim.convert(model, recipe, exclude=[str(blocks)])


def step(model: nn.Module, device: torch.device | str = "cpu") -> list[Tensor]:
    """The result and the gradients of a step."""
    torch.manual_seed(1)
    x = torch.randn(2, 8, WIDTH).to(device).requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), *(parameter.grad for parameter in (x, *model.parameters()) if parameter.grad is not None)]


@pytest.mark.parametrize("name", [name if name == "e4m3" else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES])
def test_equal_blocks_share_one_graph(name: str, device: torch.device) -> None:
    eager, model = net(RECIPES[name]).to(device), net(RECIPES[name]).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    for block in list(model)[:-1]:
        block.compile(backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        first, second = step(model, device), step(model, device)
    assert counter.frame_count == 1
    if not any(word in name for word in ("mxfp4", "nvfp4", "stochastic")):
        for own, other in zip(first, step(eager, device), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, first, second))


def test_blocks_that_share_a_graph_draw_independent_noise() -> None:
    points = FivePoint(act=Quantizer("e2m1", "stochastic"), weight=Quantizer("e2m1", "stochastic"), act_bwd=None, weight_bwd=None)
    model = qsim.convert(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), points)
    for layer in model:
        layer.load_state_dict(model[0].state_dict())
        layer.compile(backend="aot_eager", fullgraph=True)

    def drawn(layer: nn.Module) -> Tensor:
        torch.manual_seed(5)
        return layer(torch.linspace(-1, 1, WIDTH).expand(4, WIDTH))

    results = [drawn(layer) for layer in model]
    assert torch.equal(drawn(model[0]), results[0])
    assert not any(torch.equal(results[i], results[j]) for i in range(3) for j in range(i))


def test_compiled_weights_are_those_of_eager_code() -> None:
    points = FivePoint(weight=Quantizer("e2m1", "stochastic"), weight_bwd=None)
    eager = qsim.convert(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]), points)
    x = torch.randn(4, WIDTH)
    expected = eager(x)
    for layer in eager:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(eager(x), expected)


class Inner(nn.Module):
    """A product of a parameter and one of activations, neither in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.linear(x, self.weight)
        return rows + (rows @ rows.mT) @ x


class CallsCompiledCode(nn.Module):
    """Runs in Python, and calls compiled code in all the ways that there are."""

    def __init__(self, way: str, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.scores = Inner(), nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.called = torch.compile(self.inner.__call__, backend=backend) if way == "torch.compile" else self.inner
        if way == "compile":
            self.inner.compile(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x @ self.scores) @ self.scores


@pytest.mark.parametrize(
    ("way", "backend"),
    [
        ("compile", "eager"),
        pytest.param("compile", "inductor", marks=pytest.mark.slow),
        pytest.param("torch.compile", "eager", marks=pytest.mark.slow),
        pytest.param("torch.compile", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_graphs_products_are_rounded_once(way: str, backend: str) -> None:
    """A model that runs in Python rounds what it calls; compiled code in it has been rounded when it was traced."""
    points = FivePoint(lambda x: (4 * x).round() / 4 + 1, None, None)  # rounding twice would add two
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH)
    expected, own = (qsim.convert(CallsCompiledCode(kind, backend), points, calls="all")(x) for kind in ("eager", way))
    torch.testing.assert_close(own, expected)


class Casting(Block):
    """A block that multiplies by a view of a cast weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.down.double().to(x)[:, :WIDTH].T


class Around(nn.Module):
    """A module of one's own, in whose run its blocks are compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Casting() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
def test_blocks_in_a_module_of_ones_own_share_one_graph_where_they_cast_weights() -> None:
    torch.manual_seed(0)
    model = qsim.convert(Around(), RECIPES["fp8_hybrid"])
    expected = step(model)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert all(map(torch.equal, step(model), expected))
    assert counter.frame_count == 1


class Region(Block):
    """A block that compilers trace once for all of its kind."""

    forward = torch.compiler.nested_compile_region(Block.forward)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo cannot trace nested regions under a mode of functions before torch 2.13")
@pytest.mark.parametrize("name", ["fp8_hybrid", "mxfp4", "stochastic everywhere"])
def test_nested_regions_share_one_graph(name: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, given: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    step(torch.compile(net(RECIPES[name], Region, 3), backend=aot_autograd(fw_compiler=compiler), fullgraph=True))
    assert len(graphs) == 2, "forward and backward"
    for graph in graphs:
        regions = [node for node in graph.graph.nodes if "invoke_subgraph" in str(node.target)]
        assert len(regions) == 3
        # Streams are among what a region is called with, so that all blocks call the code of one.
        assert len({str(node.args[0].target) for node in regions}) == 1
