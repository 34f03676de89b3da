"""Gradients of convolutions: torch's own in any memory format, and in torch's memory format if all tensors share one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils._python_dispatch import TorchDispatchMode

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn.product.convolution_gradients import convolution_gradient
from support.comparing import same_bits

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

NOISY = Quantizer("e4m3", "stochastic")
POINTS = FivePoint(act="e4m3", weight="e4m3", act_bwd=NOISY, weight_bwd=NOISY, grad=NOISY)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def numbers(dims: int, transposed: bool) -> tuple[Any, ...]:
    """A convolution with a stride, whose shapes do not follow from each other without it."""
    return [2] * dims, [1] * dims, [1] * dims, transposed, [int(transposed)] * dims, 2


@pytest.mark.parametrize("orders", [(False, False), (True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_gradients_are_torchs_own(device: torch.device, dims: int, transposed: bool, kernel: int, orders: tuple[bool, bool]) -> None:
    a = torch.randn(3, 4, *[7] * dims, device=device)
    w = torch.randn(4, 2, *[kernel] * dims, device=device)
    if dims > 1:
        a, w = (x.contiguous(memory_format=LAST[x.dim()]) if last else x for x, last in zip((a, w), orders, strict=True))
    how = numbers(dims, transposed)
    g = torch.randn_like(torch.ops.aten.convolution(a, w, None, *how))
    expected = torch.ops.aten.convolution_backward(g, a, w, None, *how, [True, True, False])
    for second, other, wanted in ((False, w, a), (True, a, w)):
        found = convolution_gradient(g, other, wanted.shape, second, False, *how)
        # For a weight in another order than the input nothing is promised; torch then sums in another order.
        torch.testing.assert_close(found, expected[int(second)], rtol=1e-4, atol=1e-3)
        if orders[0] == orders[1]:
            assert found.stride() == expected[int(second)].stride()
            assert device.type == "cuda" or same_bits(found, expected[int(second)])


class TorchGradients(TorchDispatchMode):
    """Record the tensors of the calls of torch's own gradients, and which gradients they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self.needed: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.seen.append(args[:3])
            self.needed.append(args[10])
        return func(*args, **(kwargs or {}))


def test_nothing_is_turned_in_a_layer_whose_channels_come_last() -> None:
    layer = qsim.nn.Conv2d(4, 6, 3, points=POINTS).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    with TorchGradients() as calls:
        y.sum().backward()
        y = layer(x)
        y.backward(torch.ones_like(y))
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in calls.seen[1])
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def coarse(*shape: int, device: torch.device) -> Tensor:
    """Multiples of 1/32 below 2, many of which E4M3 must round; their products can be summed without error."""
    return torch.randint(-63, 64, shape, device=device) / 32.0


def gradients(order: torch.memory_format, device: torch.device, seed: int, call: Any = lambda layer: layer) -> list[Tensor]:
    """The result of a layer for an input in some memory order, and its gradients."""
    torch.manual_seed(0)
    layer = qsim.nn.Conv2d(4, 6, 3, points=POINTS, device=device, bias=False)
    with torch.no_grad():
        layer.weight.copy_(coarse(*layer.weight.shape, device=device))
    layer = layer.to(memory_format=order)
    x = coarse(2, 4, 8, 8, device=device).contiguous(memory_format=order).requires_grad_()
    upstream = coarse(2, 6, 6, 6, device=device).contiguous(memory_format=order)
    torch.manual_seed(seed)
    y = call(layer)(x)
    y.backward(upstream)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


def test_the_order_in_memory_changes_no_bit(device: torch.device) -> None:
    plain = gradients(torch.contiguous_format, device, seed=1)
    last = gradients(torch.channels_last, device, seed=1)
    assert all(same_bits(a, b) for a, b in zip(plain, last, strict=True))
    # The bits are those of random numbers: different seeds give different ones.
    other = gradients(torch.contiguous_format, device, seed=2)
    assert same_bits(plain[0], other[0])
    assert not any(same_bits(a, b) for a, b in zip(plain[1:], other[1:], strict=True))


@pytest.mark.slow
def test_compiled_layers_keep_channels_last_and_forward_bits(device: torch.device) -> None:
    torch._dynamo.reset()
    eager = gradients(torch.channels_last, device, seed=1)
    compiled = gradients(torch.channels_last, device, seed=1, call=lambda layer: torch.compile(layer, fullgraph=True))
    assert same_bits(eager[0], compiled[0])
    for a, b in zip(eager, compiled, strict=True):
        assert a.stride() == b.stride()
        # The seeds of stochastic points differ; the rounded tensors are the same.
        torch.testing.assert_close(a, b, rtol=0.2, atol=0.2 * float(a.abs().max()))
    torch._dynamo.reset()


def calls_of_torch(layer: nn.Module, x: Tensor) -> list[list[bool]]:
    """The gradients that each call of torch in a layer's backward pass computes: of the input, the weight and the bias."""
    y = layer(x)
    with TorchGradients() as calls:
        y.sum().backward()
    return calls.needed


def test_one_call_gives_both_gradients() -> None:
    layer, x = qsim.nn.Conv2d(4, 6, 3, points=POINTS), torch.randn(2, 4, 8, 8)
    assert calls_of_torch(layer, x.clone().requires_grad_()) == [[True, True, False]]
    assert calls_of_torch(layer, x) == [[False, True, False]]
    # A gradient that is rounded twice is a different one in each product.
    twice = qsim.nn.Conv2d(4, 6, 3, points=replace(POINTS, grad_w="e5m2"))
    assert calls_of_torch(twice, x.requires_grad_()) == [[True, False, False], [False, True, False]]


@pytest.mark.parametrize(
    ("needs_both", "expected"),
    [(False, "qsim.convolution_gradient.default"), pytest.param(True, "aten.convolution_backward.default", marks=pytest.mark.slow)],
)
def test_a_compiler_sees_one_operator(needs_both: bool, expected: str) -> None:
    torch._dynamo.reset()
    seen: list[str] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(graph, inputs, fw_compiler=note, bw_compiler=note)

    layer = torch.compile(qsim.nn.Conv2d(4, 6, 3, points=POINTS), backend=backend)
    layer(torch.randn(2, 4, 8, 8, requires_grad=needs_both)).sum().backward()
    assert [name for name in seen if "convolution_" in name] == [expected]
    torch._dynamo.reset()
