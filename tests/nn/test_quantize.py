"""qsim.nn.Quantize: tensors are rounded in the forward and the backward pass."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import Quantizer
from support.comparing import same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def passed(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the input."""
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, g)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forward", [None, "e2m1", Quantizer("e4m3", "toward_zero")], ids=str)
@pytest.mark.parametrize("backward", [None, "e5m2", Quantizer("e4m1", "up", overflow="nonfinite")], ids=str)
def test_rounds_values_and_gradients(forward: Any, backward: Any, dtype: torch.dtype, device: torch.device) -> None:
    x, g = (torch.randn(5, 7, device=device).mul(9).to(dtype) for _ in range(2))

    def rounded(t: Tensor, point: Any) -> Tensor:
        point = Quantizer(point) if isinstance(point, str) else point
        return t if point is None else point(t)

    y, gradient = passed(qsim.nn.Quantize(forward, backward), x, g)
    assert same_bits(y, rounded(x, forward))
    assert same_bits(gradient, rounded(g, backward))


def test_without_points_it_is_the_identity() -> None:
    x = torch.arange(3)
    assert qsim.nn.Quantize()(x) is x


def test_gradients_may_be_clipped_where_values_saturate() -> None:
    module = qsim.nn.Quantize(Quantizer("e2m1", clip_gradient=True), "e4m3")
    assert passed(module, torch.tensor([1.0, 7.0, -9.0]), torch.full((3,), 0.3))[1].tolist() == [0.3125, 0, 0]


def test_noise_is_drawn_at_every_call_and_follows_the_seed() -> None:
    module = qsim.nn.Quantize(Quantizer("e2m1", "stochastic"), Quantizer("e2m1", "stochastic"))
    x = torch.full((256,), 1.25)

    def seeded(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return passed(module, x, x)

    (y, gradient), (again, gradient_again), (other, other_gradient) = (seeded(seed) for seed in (1, 1, 2))
    assert {*y.unique().tolist()} == {*gradient.unique().tolist()} == {1.0, 1.5}
    assert torch.equal(y, again)
    assert torch.equal(gradient, gradient_again)
    assert not torch.equal(y, other)
    assert not torch.equal(gradient, other_gradient)
    assert not torch.equal(y, gradient)
    assert not torch.equal(module(x), module(x))


@pytest.mark.parametrize("made_again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_it_is_printed_and_saved_with_its_points(made_again: Callable[[nn.Module], nn.Module]) -> None:
    module = qsim.nn.Quantize(Quantizer("e4m3", "stochastic", overflow="nonfinite"), "e5m2")
    for one in (module, made_again(module)):
        assert repr(one) == "Quantize(forward=e4m3 Stochastic() nonfinite, backward=e5m2)"
    assert repr(qsim.nn.Quantize()) == "Quantize()"
    assert not module.state_dict()


def test_transforms_of_functions() -> None:
    module, x = qsim.nn.Quantize("e2m1", "e4m3"), torch.randn(4, 6)
    gradients = torch.func.vmap(torch.func.grad(lambda x: (module(x) ** 2).sum() / 3))(x)
    assert torch.equal(gradients, qsim.quantize(2 * qsim.quantize(x, "e2m1") / 3, "e4m3"))


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    y = qsim.nn.Quantize(None, "e4m3")(x)
    for total in (y.square().sum(), y.sum()):
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(total, x, create_graph=True, retain_graph=True)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: qsim.nn.Quantize("e44m3"), ValueError, "unknown format 'e44m3': did you mean 'e4m3'"),
        (lambda: qsim.nn.Quantize("e4m3")(torch.arange(3)), TypeError, "x must be float32, bfloat16, float16 or float64, got torch.int64"),
        (lambda: qsim.nn.Quantize(None, "e4m3")(torch.arange(3)), TypeError, "input must be float32, .* or float64, got torch.int64"),
        (
            lambda: qsim.nn.Quantize(None, "fp16")(torch.ones(3).bfloat16()),
            ValueError,
            r"gradients are torch.bfloat16, which cannot hold every value of Float\(5, 10",
        ),
    ],
)
def test_errors_are_clear(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()
