"""Layers whose products take FP8 codes, as they do on a chip: the same bits as without, whether the chip or the emulator multiplies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsim
from qsim import FivePoint, Quantizer, scaling
from qsim.nn import functional
from qsim.nn.product import plans
from qsim.nn.product.bilinear import LinearProduct
from qsim.nn.product.plans import may_run_on_chip, plan_of_codes
from support.points import in_order
from support.written_out import ProductSetting

FAST, PROMOTED = "h100_fp8", "h100_fp8_promoted"


def noisy(fmt: str) -> Quantizer:
    return Quantizer(fmt, "stochastic")


POINTS = {
    "the same": FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e5m2", accumulate=FAST),
    "twice": FivePoint("e4m3", "e4m3", act_bwd="e4m3", weight_bwd="e4m3", grad="e4m3", grad_w="e4m3", accumulate=PROMOTED),
    "stochastic": in_order(*map(noisy, ("e4m3", "e4m3", "e4m3", "e4m3", "e5m2")), accumulate=FAST),
    "all different": FivePoint(
        noisy("e4m3"),
        "e4m3",
        act_bwd=noisy("e5m2"),
        weight_bwd=noisy("e4m3"),
        grad=noisy("e5m2"),
        grad_w="e4m3",
        accumulate=(FAST, PROMOTED, FAST),
    ),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_codes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device whose layers take codes: the chip, or a processor that is taken for one by layers, and not by the operator."""
    if request.param == "cuda":
        chip: torch.device = request.getfixturevalue("hopper")
        return chip
    monkeypatch.setattr(plans, "is_chip", lambda kind, index: True)
    return torch.device("cpu")


def results(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], points: FivePoint, dtype: torch.dtype) -> list[Tensor]:
    """A result and the gradients of all inputs, from the same seed."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    torch.manual_seed(3)
    y = function(*leaves, points)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def assert_alike(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], points: FivePoint, dtype: torch.dtype) -> None:
    """Compare layers that take codes with layers that do not."""
    plain = FivePoint.from_dict({**points.to_dict(), "chip": "never"})
    for one, other in zip(results(function, inputs, points, dtype), results(function, inputs, plain, dtype), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_layers_on_codes_have_the_same_bits(points: FivePoint, on_codes: torch.device) -> None:
    x, w, bias = torch.randn(2, 16, 64), torch.randn(32, 64), torch.randn(32)
    inputs = tuple(t.to(on_codes) for t in (x, w, bias))
    plan = ProductSetting(points, LinearProduct()).plan(*inputs[:2])
    assert plan_of_codes(plan) == plan, "the layer takes codes"
    assert_alike(lambda x, w, b, p: functional.linear(x, w, b, p), inputs, points, torch.float32)
    assert_alike(lambda x, w, b, p: functional.linear(x, w, None, p) + b, inputs, points, torch.bfloat16)
    assert_alike(lambda x, w, p: functional.matmul(x, w.t(), p), inputs[:2], points, torch.float32)
    # Sizes that the chip does not take, and single gradients.
    odd = torch.randn(5, 7, device=on_codes), torch.randn(3, 7, device=on_codes)
    for i in range(2):
        assert_alike(
            lambda t, p, i=i: functional.linear(*(t if j == i else odd[j] for j in range(2)), points=p), (odd[i],), points, torch.float32
        )


def test_some_layers_do_not_take_codes() -> None:
    x, w = torch.randn(4, 32), torch.randn(8, 32)
    scaled = Quantizer("e4m3", scale=scaling.PerTensor())
    for points in (
        FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e4m3"),
        FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e4m3", accumulate=(FAST, None, FAST)),
        FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e4m3", accumulate="h100_bf16"),
        FivePoint("e4m3", "e5m2", act_bwd="same", weight_bwd="same", grad="e5m2", accumulate=FAST),
        FivePoint("e4m3", "e2m1", act_bwd="same", weight_bwd="same", grad="e4m3", accumulate=FAST),
        FivePoint(scaled, scaled, act_bwd="same", weight_bwd="same", grad=scaled, accumulate=FAST),
        FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e4m3", accumulate=FAST, chip="never"),
    ):
        assert not may_run_on_chip(ProductSetting(points, LinearProduct()).plan(x, w), 2), points


def test_an_input_is_kept_in_one_byte_per_element(on_codes: torch.device) -> None:
    x, w = torch.randn(48, 64, device=on_codes, requires_grad=True), torch.randn(32, 64, device=on_codes, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        functional.linear(x, w, points=POINTS["all different"])
    assert sorted(t.nbytes for t in kept if t.numel() > 1) == [48 * 64, 32 * 64 * 4]
    assert any(t.data_ptr() == w.data_ptr() for t in kept), "the weight itself is kept"


def test_compiled_checkpointed_and_autocast_layers(on_codes: torch.device) -> None:
    layer = qsim.convert(nn.Linear(64, 32).to(on_codes), POINTS["the same"])
    x, g = torch.randn(16, 64, device=on_codes), torch.randn(16, 32, device=on_codes)

    def step(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *layer.parameters()], g.to(y.dtype))]

    eager = step(layer)
    ways: list[Callable[[Tensor], Tensor]] = [
        torch.compile(layer, backend="inductor" if on_codes.type == "cuda" else "aot_eager", fullgraph=True),
        lambda t: checkpoint(layer, t, use_reentrant=False),  # type: ignore[no-any-return]
    ]
    for way in ways:
        (*found, bias), (*expected, expected_bias) = step(way), eager
        assert all(map(torch.equal, found, expected))
        # The bias's gradient is a sum of torch's, for which compilers have an order of their own.
        torch.testing.assert_close(bias, expected_bias)
    with torch.autocast(on_codes.type, torch.bfloat16):
        narrow = step(layer)
        layer.points = FivePoint.from_dict({**layer.points.to_dict(), "chip": "never"})
        assert all(map(torch.equal, step(layer), narrow))


def test_monitors_see_the_same(on_codes: torch.device) -> None:
    counts = []
    for chip in ("auto", "never"):
        torch.manual_seed(2)
        layer = qsim.convert(nn.Linear(64, 32).to(on_codes), FivePoint.from_dict({**POINTS["all different"].to_dict(), "chip": chip}))
        monitor = qsim.diagnostics.Monitor(layer)
        layer(torch.randn(16, 64, device=on_codes, requires_grad=True)).sum().backward()
        monitor.step()
        counts.append(str(monitor.samples))
        monitor.close()
    assert counts[0] == counts[1]
    assert all(name in counts[0] for name in ("act_bwd", "weight_bwd", "grad_w"))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_graphs_of_layers_on_the_chip() -> None:
    points = FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e4m3", accumulate=PROMOTED, chip="require")
    layer = qsim.convert(nn.Linear(1024, 4096, bias=False, device="cuda", dtype=torch.bfloat16), points)
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        y = layer(x)
        return (y.detach(), *torch.autograd.grad(y, (x, layer.weight), g))

    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="has been compared with the emulator yet"), torch.cuda.graph(graph):
        qsim.nn.functional.linear(x[:1024], layer.weight, points=points)
    eager = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    graph.replay()
    assert all(map(torch.equal, replayed, eager))
    assert "products of this size by: chip)" in repr(layer)
    layer.points = FivePoint.from_dict({**points.to_dict(), "chip": "never"})
    assert all(map(torch.equal, step(), eager))
    assert "products of this size by: emulator)" in repr(layer)
