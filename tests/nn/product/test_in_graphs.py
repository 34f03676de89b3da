"""Products in graphs: one node each, whose operators are traced later, with the bits of eager code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.random import Noise
from qsim.recipes.points_of import PointsLike
from qsim_kernels.lowered import inductor
from support import compilers

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def functions(points: PointsLike) -> list[str]:
    """The names of the functions that a layer's graph calls."""
    names: list[str] = []

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        names.extend(getattr(node.target, "__name__", "") for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch.compile(qsim.nn.Linear(32, 32, points=points), backend=backend, fullgraph=True)(torch.ones(2, 32))
    return names


def test_a_product_is_one_node() -> None:
    assert functions("mxfp8").count("product") == 1


OUTLIERS = qsim.FivePoint(act=qsim.points.Outliers("e4m3", 0.9))


def test_products_that_call_code_of_others_are_traced() -> None:
    assert "product" not in functions(OUTLIERS)


def test_products_that_call_code_of_others_give_the_bits_of_eager_code() -> None:
    layer, x = qsim.nn.Linear(32, 32, points=OUTLIERS), torch.randn(8, 32)
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gives_the_bits_of_eager_code(dynamic: bool) -> None:
    layer = qsim.nn.Linear(32, 32, points="e4m3")
    compiled = torch.compile(layer, backend=compilers.another([]), dynamic=dynamic)
    x = torch.randn(32, 32, requires_grad=True)
    results = [torch.autograd.grad(call(x).square().sum(), [x, *layer.parameters()]) for call in (layer, compiled)]
    assert all(map(torch.equal, *results))


class Signed(torch.nn.Module):
    """Multiplies both operands of a product by random signs that they share, and that cancel in the product alone."""

    draws_signs = is_directed = True

    def forward(self, x: torch.Tensor, signs: Noise | None = None) -> torch.Tensor:
        """Multiply each row."""
        return x * (1 - 2 * qsim.quantize(torch.full(x.shape[-1:], 0.5), qsim.formats.Int(1, signed=False), "stochastic", seed=signs))


@pytest.mark.skipif(not inductor.is_tested("cpu"), reason="graphs hold torch's own operators in releases that loops were not tested with")
@pytest.mark.parametrize("points", ["e4m3", "fp8_hybrid"])
def test_results_of_attention_are_rounded_again_rather_than_kept_twice(points: PointsLike) -> None:
    """Attention's own backward pass needs them unrounded; what follows a ReLU is kept rounded alone."""
    layer = qsim.convert(torch.nn.Linear(64, 32), points)

    def attention(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 16, 4, 16).transpose(1, 2)
        return layer(torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2))

    def relu(x: torch.Tensor) -> torch.Tensor:
        return layer(x.relu())

    for call, rounds_again in ((attention, True), (relu, False)):
        torch._dynamo.reset()
        x, graphs = torch.randn(2, 16, 64, requires_grad=True), []
        result = torch.compile(call, backend=compilers.inductor(graphs))(x)
        found = torch.autograd.grad(result.sum(), [x, layer.weight])
        assert all(map(torch.equal, found, torch.autograd.grad(call(x).sum(), [x, layer.weight])))
        again = [node.args[1] for node in graphs[1].nodes if str(node.target) == "qsim.again.default"]
        assert again.count(False) == rounds_again
        assert again.count(True) == 1  # the weight


@pytest.mark.parametrize("are_recorded", [True, False])
def test_graphs_that_are_recorded_draw_all_seeds_in_the_forward_pass(are_recorded: bool) -> None:
    """The streams from which seeds follow are on the CPU, where CUDA graphs can keep nothing for the backward pass."""
    noise = qsim.Quantizer("e4m3", "stochastic")
    layer = qsim.convert(torch.nn.Linear(64, 32), qsim.FivePoint("e4m3", "e4m3", noise, act_bwd=noise, weight_bwd=noise))
    graphs: list[torch.fx.Graph] = []
    settings = {"triton.cudagraphs": are_recorded}
    torch.compile(layer, backend=compilers.inductor(graphs, **settings))(torch.randn(8, 64, requires_grad=True)).sum().backward()
    forward, backward = ({str(node.target) for node in graph.nodes} for graph in graphs)
    seeds = {"qsim.of_stream.default", "qsim.weight_seed_in_graph.default"}
    assert (seeds <= forward) == are_recorded
    assert seeds.isdisjoint(backward) == are_recorded


def test_operands_of_a_product_share_signs_in_whichever_pass_they_are_rounded() -> None:
    """AOTAutograd computes in the forward pass what it keeps of the input, and the rest in the backward pass."""
    signed = Signed()
    plain = torch.nn.Linear(16, 8)
    layer = qsim.nn.Linear(16, 8, points=qsim.FivePoint(grad=signed, act_bwd=signed, weight_bwd=signed))
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(4, 16)
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition")
    for call in (plain, compiled):
        call(x.sin()).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


class Checkpointed(torch.nn.Module):
    """A layer whose input is rounded stochastically, and again for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = qsim.nn.Linear(8, 8, bias=False, points=qsim.FivePoint(act=qsim.Quantizer("e2m1", "stochastic")))
        torch.nn.init.eye_(self.layer.weight)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        found: torch.Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return found


@pytest.mark.skipif(torch.__version__ < "2.13", reason="checkpoints in nested regions are tested from torch 2.13 on")
def test_regions_that_checkpoint_draw_the_same_random_bits_again() -> None:
    """The other order, a checkpoint around a region, does not in torch 2.13."""
    blocks = [Checkpointed(), Checkpointed()]
    x = torch.full((8, 8), 1.25, requires_grad=True)
    results = torch.compile(lambda x: [block(x) for block in blocks], backend="aot_eager_decomp_partition", fullgraph=True)(x)
    torch.autograd.backward(results, [torch.eye(8)] * 2)
    assert not torch.equal(*results)
    assert all(torch.equal(block.layer.weight.grad, result) for block, result in zip(blocks, results, strict=True))
