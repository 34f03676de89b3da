"""Errors of `qsim.optim.Quantized`, raised before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qsim
from qsim import Quantizer
from qsim.optim import Quantized
from support.comparing import same_bits
from support.optimizers import MAKERS, Lion, parameters, run
from support.refusing import refused

NOISY = Quantizer("e4m3", "stochastic")
SEED = 77


def sgd(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    p = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=dtype.is_floating_point)
    return p, torch.optim.SGD([p], 1.0)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"weight": "e4m33"}, ValueError, ["weight", "e4m33"]),
        ({"grad": 5}, TypeError, ["grad", "5"]),
        ({"state": {"exp_avg": "float7"}}, ValueError, ["state['exp_avg']", "float7"]),
        ({"state": {1: "bf16"}}, TypeError, ["state names must be strings", "1"]),
        ({"accumulator": "nothing"}, ValueError, ["accumulator", "nothing"]),
        ({"grad_scale": 0.0}, ValueError, ["grad_scale", "positive", "0.0"]),
        ({"grad_scale": float("inf")}, ValueError, ["grad_scale", "finite", "inf"]),
        ({"grad_scale": "2"}, TypeError, ["grad_scale", "number", "'2'"]),
        ({"seed": 1.5}, TypeError, ["seed", "int", "1.5"]),
        ({"seed": 2**63}, ValueError, ["seed", "64 signed bits"]),
    ],
)
def test_arguments_are_refused(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with refused(error, "Quantized", *words):
        Quantized(sgd(3)[1], **options)


@pytest.mark.parametrize("optimizer", [None, nn.Linear(1, 1), Quantized(sgd(3)[1])])
def test_objects_that_are_not_optimizers_raise_an_error(optimizer: Any) -> None:
    with refused(TypeError, "optimizer must be a torch.optim.Optimizer", type(optimizer).__name__):
        Quantized(optimizer)


def test_parameters_are_refused() -> None:
    with refused(ValueError, "weight of parameter 0", "bfloat16", "Float(5, 10", "float16, float32, float64 can"):
        Quantized(sgd(3, dtype=torch.bfloat16)[1], weight="fp16")
    for dtype in (torch.complex64, torch.int32):
        p = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
        with refused(TypeError, "parameter 0", "float32", str(dtype)):
            Quantized(Lion([p]))
    optimizer = Quantized(sgd(3)[1], weight="fp32")
    with refused(ValueError, "weight of parameter 1", "bfloat16"):
        optimizer.add_param_group({"params": sgd(3, dtype=torch.bfloat16)[0]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("by_closure", [False, True])
def test_gradients_are_refused(by_closure: bool) -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))
    optimizer = Quantized(torch.optim.SGD([first, second], 1.0), weight=NOISY, grad=NOISY, grad_scale=2)
    first.grad = torch.ones(3)
    second.grad = torch.ones(3, 2).to_sparse()
    arguments = [lambda: None] if by_closure else []
    optimizer.param_groups[0]["quantized_seed"] = 1
    with refused(TypeError, "gradient of parameter 1", "dense", "sparse", untouched=(first, first.grad, second)):
        optimizer.step(*arguments)
    second.grad = torch.ones(()).expand(3, 2)
    with refused(ValueError, "gradient of parameter 1", "share one place", untouched=(first, first.grad, second)):
        optimizer.step(*arguments)
    assert optimizer.steps == 0


def test_a_gradient_format_that_does_not_fit_is_refused() -> None:
    p, inner = sgd(3, dtype=torch.bfloat16)
    p.grad = torch.ones_like(p)
    optimizer = Quantized(inner, grad=Quantizer("fp16", "stochastic"))
    with refused(ValueError, "gradient of parameter 0", "bfloat16", untouched=(p, p.grad)):
        optimizer.step()


def test_states_are_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"AdamW keeps no state 'momentum'; those that can be rounded: exp_avg, exp_avg_sq$"):
        Quantized(torch.optim.AdamW([p]), state={"exp_avg": "bf16", "momentum": "bf16"}).step()
    with pytest.raises(ValueError, match="SGD keeps no state 'momentum_buffer'; those that can be rounded: none"):
        Quantized(torch.optim.SGD([p]), state={"momentum_buffer": "bf16"}).step()
    wide = Quantizer(qsim.Fixed(32, 8))
    with pytest.raises(ValueError, match=r"state 'exp_avg' of parameter 0: torch.float32 cannot hold every value of"):
        Quantized(torch.optim.AdamW([p]), state=wide).step()


def test_names_of_states_wait_for_a_gradient() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Quantized(torch.optim.AdamW([p]), state={"exp_avg": "bf16"})
    optimizer.step()
    p.grad = torch.ones(3)
    optimizer.step()
    assert same_bits(optimizer.state[p]["exp_avg"], qsim.quantize(optimizer.state[p]["exp_avg"], "bf16"))


def test_state_dicts_are_refused() -> None:
    params = parameters()
    with_copies = Quantized(MAKERS["AdamW"](params), accumulator="fp32")
    run(with_copies, range(1))
    saved = with_copies.state_dict()
    without = Quantized(MAKERS["AdamW"](parameters()))
    with refused(ValueError, "has accumulators", "accumulator= is None"):
        without.load_state_dict(saved)
    other = Quantized(MAKERS["AdamW"]([nn.Parameter(torch.ones(n)) for n in range(4)]), accumulator="fp32")
    with refused(ValueError, "accumulator of parameter 0", "shape (0,)", "shape (5, 7)"):
        other.load_state_dict(saved)
    doubles = Quantized(MAKERS["AdamW"](parameters(torch.float64)), accumulator="fp32")
    run(doubles, range(1))
    bf16 = Quantized(MAKERS["AdamW"](parameters(torch.bfloat16)), accumulator="bf16")
    with refused(ValueError, "accumulator of parameter 0", "float32", "float64"):
        bf16.load_state_dict(doubles.state_dict())
    fewer = Quantized(MAKERS["AdamW"](parameters()[:2]), accumulator="fp32")
    with pytest.raises(ValueError, match="doesn't match the size"):
        fewer.load_state_dict(saved)
    assert not fewer.state


@pytest.mark.gpu
def test_noise_in_a_cuda_graph_is_refused() -> None:
    p = nn.Parameter(torch.ones(3, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = Quantized(torch.optim.SGD([p], 1.0), weight=Quantizer("e4m3", "stochastic"), seed=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="every replay of a CUDA graph would repeat this step's noise"):
        optimizer.step()
    assert optimizer.steps == 0
