"""Torch's older tracing APIs raise errors that name the alternative; torch.export and torch.compile work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.nn import functional
from support.refusing import refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")

X = torch.arange(16.0).view(2, 8) / 8
POINTS = qsim.FivePoint(act="e4m3", weight="e4m3", act_bwd=None, weight_bwd=None)
STOCHASTIC = qsim.FivePoint(act=qsim.Quantizer("e4m3", "stochastic"), act_bwd=None)

LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "a layer": lambda: (qsim.nn.Linear(8, 4, points=POINTS), X),
    "stochastic": lambda: (qsim.nn.Linear(8, 4, points=STOCHASTIC), X),
    "a converted model": lambda: (qsim.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), "mxfp8"), X),
    "a convolution": lambda: (qsim.nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular", points=POINTS), X[None]),
    "a transposed convolution": lambda: (qsim.nn.ConvTranspose1d(2, 4, 3, points=POINTS), X[None]),
    "a lookup": lambda: (qsim.nn.Embedding(8, 4, points=qsim.FivePoint(weight="e4m3", weight_bwd=None)), torch.arange(3)),
    "delayed scales": lambda: (
        qsim.nn.Linear(8, 4, points=qsim.FivePoint(act=qsim.Quantizer("e4m3", scale=qsim.scaling.Delayed(4)), act_bwd=None)),
        X,
    ),
}

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "quantize": lambda x: qsim.quantize(x, "e4m3", "stochastic"),
    "quantize under scales": lambda x: qsim.quantize(x, "mxfp8"),
    "quantize_": lambda x: qsim.quantize_(x + 0, "e4m3"),
    "encode": lambda x: qsim.encode(x, "e4m3", "stochastic"),
    "decode": lambda x: qsim.decode(x.to(torch.uint8), "e4m3"),
    "Hadamard": lambda x: qsim.transforms.Hadamard(4)(x),
}

INSTEAD = "use torch.compile or torch.export.export instead"
REVERT = "or take the points away with qsim.revert(model)"
SYMBOLIC = "torch.fx.symbolic_trace is not supported"
GRAPH = "torch.export.export(model, inputs).module() gives a torch.fx graph"


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_not_traced_or_scripted(name: str) -> None:
    module, x = LAYERS[name]()
    with refused(RuntimeError, "layers with points: torch.jit.trace is not supported", INSTEAD, REVERT):
        torch.jit.trace(module, x)
    with refused(RuntimeError, "torch.jit.script is not supported", INSTEAD, REVERT):
        torch.jit.script(module)
    with refused(TypeError, "layers with points: an operand is a torch.fx.Proxy", SYMBOLIC, GRAPH, REVERT):
        torch.fx.symbolic_trace(module)


def test_attention() -> None:
    module = qsim.nn.MultiheadAttention(8, 2, points=POINTS)
    with refused(RuntimeError, "torch.jit.trace is not supported", INSTEAD, REVERT):
        torch.jit.trace(module, (X, X, X))
    with refused(RuntimeError, "MultiheadAttention: torch.jit.script is not supported", INSTEAD, REVERT):
        torch.jit.script(module)
    with refused(TypeError, "MultiheadAttention: an operand is a torch.fx.Proxy", GRAPH, REVERT):
        torch.fx.symbolic_trace(module)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_not_traced(name: str) -> None:
    function = FUNCTIONS[name]
    with refused(RuntimeError, f"{name.split()[0]}: torch.jit.trace is not supported", INSTEAD):
        torch.jit.trace(function, X)
    with refused(TypeError, f"{name.split()[0]}: an operand is a torch.fx.Proxy", SYMBOLIC, GRAPH):
        torch.fx.symbolic_trace(function)


def test_only_the_weight_is_traced() -> None:
    with refused(TypeError, "layers with points: an operand is a torch.fx.Proxy", GRAPH):
        torch.fx.symbolic_trace(lambda w: functional.linear(X, w, points=POINTS))


def calls_quantize(x: torch.Tensor):  # type: ignore[no-untyped-def]
    return qsim.quantize(x, "e4m3")


@pytest.mark.parametrize("function", [qsim.quantize, qsim.quantize_, qsim.encode, qsim.decode, qsim.functional.threshold_quantize])
def test_functions_are_not_scripted(function: Callable[..., Any]) -> None:
    with refused(RuntimeError, f"{function.__name__}: torch.jit.script is not supported", INSTEAD):
        torch.jit.script(function)


def test_functions_that_call_them_are_not_scripted() -> None:
    with pytest.raises(RuntimeError, match=r"quantize: torch.jit.script is not supported: use torch.compile"):
        torch.jit.script(calls_quantize)


def test_quantize_layers() -> None:
    module = qsim.nn.Quantize("e4m3", backward="e5m2")
    with refused(RuntimeError, "quantize: torch.jit.trace is not supported", INSTEAD):
        torch.jit.trace(module, X)
    with refused(RuntimeError, "Quantize: torch.jit.script is not supported", INSTEAD):
        torch.jit.script(module)
    with refused(TypeError, "quantize: an operand is a torch.fx.Proxy", GRAPH):
        torch.fx.symbolic_trace(module)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["a layer", "a converted model", "a convolution", "a lookup"])
def test_the_ways_that_the_errors_name(name: str) -> None:
    module, x = LAYERS[name]()
    expected = module(x)
    assert torch.equal(torch.export.export(module, (x,)).module()(x), expected)
    reverted = qsim.revert(module) if name == "a converted model" else None
    if reverted is not None:
        assert torch.equal(torch.jit.trace(reverted, x)(x), reverted(x))
        assert torch.equal(torch.fx.symbolic_trace(reverted)(x), reverted(x))


def test_layers_without_points_can_be_traced() -> None:
    for module, x in ((qsim.nn.Linear(8, 4), X), (qsim.nn.Conv1d(2, 4, 3), X[None])):
        assert torch.equal(torch.jit.trace(module, x)(x), module(x))
        assert torch.equal(torch.fx.symbolic_trace(module)(x), module(x))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["fp8_hybrid()", "nvfp4()", "fp8_hybrid.with_(accumulate='h100_fp8')"])
def test_exported_layers_with_scales_or_sums_add_their_bias(recipe: str, dtype: torch.dtype) -> None:
    """An exported program calls operators on parameters, outside of an autograd function."""
    module, x = qsim.nn.Linear(32, 16, points=recipe, dtype=dtype), torch.randn(4, 32, dtype=dtype)
    assert torch.equal(torch.export.export(module, (x,)).module()(x), module(x))
