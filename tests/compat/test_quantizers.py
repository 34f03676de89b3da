"""Quantizers of `qsim.compat.qtorch`: seeds, gradients, hooks, copies, checkpoints and compiled code."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from qsim.compat.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint, Number
from qsim.compat.qtorch.quant import Quantizer, quantizer

NUMBERS = [FixedPoint(8, 4), FixedPoint(8, 4, clamp=False), BlockFloatingPoint(8), BlockFloatingPoint(8, 0), FloatingPoint(4, 3)]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_seeds_make_results_reproducible(number: Number) -> None:
    x, quant = torch.randn(1000), quantizer(number, number)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        leaf = x.clone().requires_grad_()
        out = quant(leaf)
        out.backward(x / 3)
        outputs.append((out.detach(), leaf.grad, number.round(x)))
    for a, b, c in zip(*outputs, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert not torch.equal(outputs[0][0], outputs[0][2])


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (1, 1)])
def test_empty_tensors(shape: tuple[int, ...], number: Number) -> None:
    x = torch.ones(shape, requires_grad=True)
    got = quantizer(number, number)(x)
    got.sum().backward()
    assert got.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape


def test_clamping_grad_zero_and_hooks_whatever_else_there_is() -> None:
    x = torch.tensor([0.3, 9.0, -9.0], requires_grad=True)
    quantizer(FixedPoint(4, 2), clamping_grad_zero=True)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0, 0.0]
    x.grad = None
    quantizer(backward_hooks=[lambda g: g + 1, lambda g: g * 3])(x).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0, 6.0]
    x.grad = None
    number = FloatingPoint(4, 1)
    quantizer(None, number, backward_rounding="nearest", clamping_grad_zero=True, backward_hooks=[lambda g: g * 1.3])(x).sum().backward()
    assert x.grad.tolist() == [1.5, 1.5, 1.5]


def test_a_quantizer_of_nothing_is_the_identity() -> None:
    x = torch.randn(5, requires_grad=True)
    before = torch.get_rng_state()
    got = quantizer()(x)
    got.backward(x.detach())
    assert torch.equal(got, x)
    assert torch.equal(x.grad, x)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


def test_quantizers_are_copied_and_pickled() -> None:
    quant = Quantizer(FloatingPoint(4, 3), FloatingPoint(5, 2))
    x = torch.randn(100)
    for other in (copy.deepcopy(quant), pickle.loads(pickle.dumps(quant))):
        torch.manual_seed(3)
        a = quant(x)
        torch.manual_seed(3)
        assert torch.equal(a, other(x))


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_compiled_code_rounds_alike(number: Number) -> None:
    x = torch.randn(7, 9) * 10
    compiled = torch.compile(lambda x: number.round(x, "nearest"), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), number.round(x, "nearest"))
    quant = quantizer(number, number, "nearest", "nearest")
    outputs = []
    for call in (quant, torch.compile(quant, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        got = call(leaf)
        got.backward(x / 3)
        assert leaf.grad is not None
        outputs.append(torch.stack([got.detach(), leaf.grad]))
    assert torch.equal(*outputs)


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(quantizer(FloatingPoint(4, 3))(x).sum(), x, create_graph=True)
