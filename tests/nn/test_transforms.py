"""Layers with points under the transforms of `torch.func`: the gradients of `backward`, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import qsim
from qsim import FivePoint, Quantizer, recipes
from qsim.scaling import Delayed
from support.comparing import same_bits

NEAREST = FivePoint(Quantizer("e4m3", clip_gradient=True), "e4m3", act_bwd="e5m2", weight_bwd="same", grad="e5m2", grad_w="e4m3")
POINTS = {"nearest": NEAREST, "mxfp8": recipes.mxfp8().points, "fp8_hybrid": recipes.fp8_hybrid().points}


def converted(points: FivePoint) -> nn.Module:
    torch.manual_seed(0)
    return qsim.convert(nn.Sequential(nn.Conv1d(3, 4, 2), nn.GELU(), nn.Flatten(), nn.Linear(16, 2)), points)


def loss(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda parameters, x: functional_call(model, parameters, (x,)).square().sum()


def usual(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


X = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("points", POINTS)
def test_gradients_are_those_of_backward(points: str) -> None:
    model = converted(POINTS[points])
    found = grad(loss(model))(parameters(model), 1000 * X)
    assert all(map(same_bits, found.values(), usual(model, 1000 * X)))


@pytest.mark.parametrize("points", ["nearest", "mxfp8"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_single_samples(points: str) -> None:
    model = converted(POINTS[points])
    found = vmap(grad(loss(model)), in_dims=(None, 0))(parameters(model), X[:, None])
    for i in range(len(X)):
        for batch, one in zip(found.values(), usual(model, X[i : i + 1]), strict=True):
            torch.testing.assert_close(batch[i], one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(jacrev(model)(X[:1])[0, 1, 0], torch.autograd.functional.jacobian(model, X[:1])[0, 1, 0])


def noisy() -> FivePoint:
    return FivePoint(act=Quantizer("e4m3", "stochastic"), act_bwd=None)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "random bits of weights": (
        lambda: gradient(FivePoint(weight=Quantizer("e4m3", "stochastic"))),
        r"layers with random bits do not support the transforms of torch\.func",
    ),
    "random bits": (
        lambda: gradient(noisy()),
        r"layers with random bits do not support the transforms of torch\.func \(grad, vmap, …\): use back",
    ),
    "delayed": (lambda: gradient(recipes.fp8_hybrid(Delayed(4)).points), "layers with delayed scales do not support"),
    "sums": (
        lambda: gradient(FivePoint("e4m3", "e4m3", "e5m2", accumulate="h100_bf16")),
        "layers with an accumulator do not support",
    ),
    "scales": (
        lambda: jacrev(converted(POINTS["fp8_hybrid"]))(X),
        "under vmap, layers with scales of whole tensors or rows do not support",
    ),
    "twice": (lambda: grad(lambda x: gradient(NEAREST, x).sum())(X), "rounding at points cannot be differentiated twice"),
    "forward mode": (lambda: jvp(converted(NEAREST), (X,), (X,)), "layers with points have no forward-mode derivative"),
    "second": (lambda: hessian(converted(NEAREST))(X), "layers with points have no forward-mode derivative"),
    "a table": (
        lambda: grad(lambda w: functional_call(table(), {"weight": w}, (torch.tensor([1]),)).sum())(torch.ones(3, 2)),
        "embeddings with points do not support",
    ),
}


def gradient(points: FivePoint, x: Tensor = X) -> Tensor:
    model = converted(points)
    return grad(lambda x: model(x).sum())(x)  # type: ignore[no-any-return]


def table() -> nn.Module:
    return qsim.nn.Embedding(3, 2, points=FivePoint(weight="e4m3", weight_bwd=None))


@pytest.mark.parametrize("case", REFUSED)
def test_the_rest_is_refused(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(RuntimeError, match=words):
        call()


def test_compiled_code_cannot_apply_them() -> None:
    model = converted(NEAREST)
    compiled = torch.compile(lambda own: grad(loss(model))(own, X), fullgraph=True, backend="eager")
    with pytest.raises(
        RuntimeError, match=r"compiled code cannot apply the transforms of torch.func \(grad, vmap, …\) to layers with points"
    ):
        compiled(parameters(model))
