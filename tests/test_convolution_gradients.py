"""Gradients of convolutions: torch's own, from tensors in whatever order, and in the order in which torch's come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qsim
from comparing import same_bits
from qsim import FivePoint, Quantizer
from qsim.nn.convolution_gradients import convolution_gradient, memory_format

NOISY = Quantizer("e4m3", "stochastic")
POINTS = FivePoint(act="e4m3", weight="e4m3", act_bwd=NOISY, weight_bwd=NOISY, grad=NOISY)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def numbers(dims: int, transposed: bool) -> tuple[Any, ...]:
    """A convolution with a stride, whose shapes do not follow from one another without it."""
    return [2] * dims, [1] * dims, [1] * dims, transposed, [int(transposed)] * dims, 2


@pytest.mark.parametrize("order", ["in order", "channels last"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_gradients_are_torchs_own(device: torch.device, dims: int, transposed: bool, order: str) -> None:
    a = torch.randn(3, 4, *[7] * dims, device=device)
    w = torch.randn(4, 2, *[3] * dims, device=device)
    if order == "channels last" and dims > 1:
        a, w = (x.contiguous(memory_format=LAST[x.dim()]) for x in (a, w))
    how = numbers(dims, transposed)
    g = torch.randn_like(torch.ops.aten.convolution(a, w, None, *how))
    expected = torch.ops.aten.convolution_backward(g, a, w, None, *how, [True, True, False])
    for second, other, wanted in ((False, w, a), (True, a, w)):
        found = convolution_gradient(g, other, wanted.shape, second, *how)
        torch.testing.assert_close(found, expected[int(second)])
        assert found.is_contiguous(memory_format=memory_format(g, other))
        if device.type == "cpu":
            assert same_bits(found, expected[int(second)])


@pytest.mark.parametrize("second", [False, True])
def test_opcheck_with_channels_last(device: torch.device, second: bool) -> None:
    a, w = torch.randn(2, 4, 6, 6, device=device), torch.randn(4, 2, 3, 3, device=device)
    a, w = (x.contiguous(memory_format=torch.channels_last) for x in (a, w))
    how = numbers(2, False)
    g = torch.ops.aten.convolution(a, w, None, *how)
    other, shape = (a, w.shape) if second else (w, a.shape)
    torch.library.opcheck(torch.ops.qsim.convolution_gradient.default, (g, other, list(shape), second, *how))


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (2, 4, 3, 5, 6)])
def test_channels_come_last_where_they_do_in_a_tensor(shape: tuple[int, ...]) -> None:
    plain = torch.zeros(shape)
    last = plain.contiguous(memory_format=LAST[len(shape)])
    assert memory_format(plain, plain) == torch.contiguous_format
    assert memory_format(last, plain) == memory_format(plain, last) == LAST[len(shape)]
    # What is both stays in order, as torch has it.
    assert memory_format(torch.zeros(shape[0], 1, *shape[2:])) == torch.contiguous_format
    assert memory_format(torch.zeros(2, 3, 4)) == torch.contiguous_format


class Strides(TorchDispatchMode):
    """Notes the strides of what torch's own gradients are asked for with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.seen.append(args[:3])
        return func(*args, **(kwargs or {}))


def test_nothing_is_turned_in_a_layer_whose_channels_come_last() -> None:
    layer = qsim.nn.Conv2d(4, 6, 3, points=POINTS).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    with Strides() as strides:
        y.sum().backward()
        y = layer(x)
        y.backward(torch.ones_like(y))
    first, second = strides.seen[2:]
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in first)
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in second[:2])
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_the_order_in_memory_changes_no_bit(device: torch.device) -> None:
    results = []
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layer = qsim.nn.Conv2d(4, 6, 3, points=POINTS, device=device).to(memory_format=order)
        x = (torch.randn(2, 4, 8, 8, device=device)).contiguous(memory_format=order).requires_grad_()
        # Of small integers times powers of two every sum is exact, so that bits can only differ by what was rounded how.
        with torch.no_grad():
            x.mul_(4).round_().div_(4)
            layer.weight.mul_(16).round_().div_(16)
        y = layer(x)
        y.backward((y.detach() * 0 + 1).contiguous(memory_format=order))
        results.append((y, x.grad, layer.weight.grad))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["in order", "channels last"])
def test_compiled_layers_give_the_same_bits(device: torch.device, order: torch.memory_format) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)).to(device, memory_format=order)
    model = qsim.convert(model, FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2"))
    x = torch.randn(2, 4, 9, 9, device=device).contiguous(memory_format=order)
    results = []
    for call in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        y = call(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    torch._dynamo.reset()
