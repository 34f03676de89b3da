"""Operators are called directly only where nothing could tell: modes, subclasses, torch.func, tracers and profilers see all of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import qsim
from qsim import FivePoint, Quantizer
from qsim_kernels.ops.backend import library
from qsim_kernels.ops.direct import DISPATCHED, operators, operators_of_lists

STOCHASTIC = Quantizer("e4m3", "stochastic")
POINTS = {
    "plain": FivePoint("e4m3", STOCHASTIC, act_bwd=STOCHASTIC, weight_bwd="same", grad=STOCHASTIC),
    "tensor": qsim.recipes.fp8_hybrid().points,
    "blocks": qsim.recipes.nvfp4().points,
}


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "qsim":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


class Pass(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    pass


@contextmanager
def profiled() -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU]):
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": Log,
    "function mode": Pass,
    "default device": lambda: torch.device("cpu"),
    "fake tensors": FakeTensorMode,
    "profiler": profiled,
}


def is_direct(x: Tensor, *others: Tensor | None) -> bool:
    return operators(x, *others) is not DISPATCHED


def test_plain_tensors_are_direct(device: torch.device) -> None:
    x = torch.randn(3, device=device)
    with torch.inference_mode():
        inferred = torch.randn(3, device=device)
        assert is_direct(inferred, nn.Parameter(x))
    for plain in (x, nn.Parameter(x), x.double(), x[::2], inferred):
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            assert is_direct(plain)
    assert is_direct(x, None, nn.Parameter(x))


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_not(mode: str) -> None:
    x = torch.randn(3)
    with MODES[mode]():
        assert not is_direct(x)
    assert is_direct(x)


def test_tensors_of_other_kinds_are_not() -> None:
    x = torch.randn(3)
    with FakeTensorMode():
        fake = torch.randn(3)
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert operators_of_lists([torch.ones(5), negative], [torch.ones(5)]) is DISPATCHED
    for other in (x.as_subclass(Own), x.to("meta"), x.to_sparse(), fake, negative):
        assert not is_direct(other)
        assert not is_direct(x, other)
    assert torch.equal(qsim.quantize(negative, "e4m3"), qsim.quantize(negative.clone(), "e4m3"))


def test_transforms_and_tracers_are_not() -> None:
    seen: list[bool] = []

    def f(x: Tensor) -> Tensor:
        seen.append(is_direct(x))
        return (x * 2).sum()

    x = torch.randn(3, 2)
    torch.func.vmap(f)(x)
    torch.func.grad(f)(x)
    make_fx(f)(x)
    make_fx(f, pre_dispatch=True)(x)
    torch.jit.trace(f, x, check_trace=False)
    assert len(seen) >= 5
    assert not any(seen)


def test_direct_functions_are_those_that_are_dispatched(device: torch.device) -> None:
    backend = device.type.upper()
    for name, function in vars(operators(torch.empty(1, device=device))).items():
        assert function == library.implementation(name, backend)
        assert getattr(DISPATCHED, name) is getattr(torch.ops.qsim, name).default


@pytest.mark.parametrize("kind", POINTS)
def test_layers_give_the_same_bits_both_ways(kind: str, device: torch.device) -> None:
    torch.manual_seed(0)
    layer = qsim.nn.Linear(32, 16, points=POINTS[kind], stream=1, device=device)
    x, g = torch.randn(32, 32, device=device, requires_grad=True), torch.randn(32, 16, device=device)
    found, logs = [], []
    for forward, backward in ((nullcontext(), nullcontext()), (Log(), Log()), (nullcontext(), Log())):
        torch.manual_seed(1)
        with forward as log:
            y = layer(x)
        with backward as later:
            found.append((y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), g)))
        logs.append([None if each is None else each.names for each in (log, later)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    (_, all_backward), (forward_ops, backward_ops) = logs[2], logs[1]
    assert forward_ops
    assert backward_ops
    assert all_backward == backward_ops
    assert any(name.startswith("quantize") for name in backward_ops)


def test_profiles_name_the_operators() -> None:
    layer, x = qsim.nn.Linear(4, 4, points=POINTS["plain"]), torch.randn(3, 4)
    with profile(activities=[ProfilerActivity.CPU]) as profiled_run:
        layer(x).sum().backward()
        qsim.quantize(x, "e4m3")
    names = {event.key for event in profiled_run.key_averages()}
    assert {"qsim::quantize", "qsim::quantize_and_encode", "qsim::quantize_and_sum", "qsim::decode"} <= names
