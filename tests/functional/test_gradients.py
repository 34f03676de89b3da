"""Gradients: straight through, clipped, of other dtypes, of higher order and in forward mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import rounding as roundings
from qsim.formats import E2M1, E4M3, FP16, Format, Int
from support.calls import points, same
from support.comparing import raw


@pytest.fixture
def x(device: torch.device) -> Tensor:
    """Four rows of three values."""
    return points(device)


@pytest.mark.parametrize("rounding", list(roundings.NAMED))
@pytest.mark.parametrize("fmt", [E4M3, E2M1, Int(4)], ids=repr)
def test_passes_straight_through(x: Tensor, fmt: Format, rounding: str) -> None:
    leaf = x.clone().requires_grad_()
    upstream = torch.arange(12.0, device=x.device).view(4, 3) - 5
    qsim.quantize(leaf, fmt, rounding=rounding).backward(upstream)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, upstream)


def test_clipped_passes_within_the_range_and_at_its_ends(device: torch.device) -> None:
    # As that of clamp before torch 2.14, from which on clamp stops it at the ends.
    values = [448.0, -448.0, 448.1, -448.1, 464.0, torch.inf, -torch.inf, 0.0, 1.0, 447.9, 1e-30]
    leaf = torch.tensor(values, device=device, requires_grad=True)
    upstream = torch.arange(1.0, 12.0, device=device)
    qsim.quantize(leaf, "e4m3", clip_gradient=True).backward(upstream)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 8.0, 9.0, 10.0, 11.0]


def test_clips_each_end_at_its_own_value(device: torch.device) -> None:
    leaf = torch.tensor([127.0, 127.5, -128.0, -128.5], device=device, requires_grad=True)
    qsim.quantize(leaf, "int8", clip_gradient=True).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_has_the_inputs_dtype(x: Tensor, dtype: torch.dtype) -> None:
    leaf = x.clone().requires_grad_()
    rounded = qsim.quantize(leaf, "e4m3", dtype=dtype)
    assert rounded.dtype == dtype
    upstream = torch.full_like(rounded, 1 / 3)
    rounded.backward(upstream)
    assert leaf.grad is not None
    assert same(leaf.grad, upstream.float())


def test_finite_differences_of_the_clipped_identity(device: torch.device) -> None:
    # Values of the format moved by multiples of its steps stay values: rounding is the identity there, and its slope can be measured.
    x = torch.tensor([1.0, -2.5, 96.0, 3.0], dtype=torch.float64, device=device, requires_grad=True)
    call = lambda x: qsim.quantize(x, qsim.Fixed(16, 8), clip_gradient=True)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x,), eps=2.0**-8, atol=0, rtol=0)
    beyond = torch.tensor([130.0, -130.0], dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(call, (beyond,), eps=2.0**-8, atol=0, rtol=0)


def test_of_the_gradient(device: torch.device) -> None:
    leaf = torch.tensor([0.3, -1.7, 2.2], device=device, requires_grad=True)
    (first,) = torch.autograd.grad(qsim.quantize(leaf**3, "e4m3").sum(), leaf, create_graph=True)
    assert torch.equal(first, 3 * leaf.detach() ** 2)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert torch.allclose(second, 6 * leaf.detach(), rtol=1e-6)


def test_in_functional_transforms(device: torch.device) -> None:
    x = torch.tensor([0.3, -1.7, 1000.0], device=device)
    loss = lambda x: qsim.quantize(x, "e4m3", clip_gradient=True).square().sum()  # noqa: E731
    expected = 2 * qsim.quantize(x, "e4m3") * torch.tensor([1.0, 1.0, 0.0], device=device)
    assert torch.equal(torch.func.grad(loss)(x), expected)
    jacobian = torch.func.jacrev(lambda x: qsim.quantize(x, "e4m3"))(x)
    assert torch.equal(jacobian, torch.eye(3, device=device))


def test_forward_mode(device: torch.device) -> None:
    # The tangent passes straight through too; zero would be the true derivative, but not a useful one.
    x, tangent = torch.tensor([0.3, -1.7, 1000.0], device=device), torch.tensor([1.0, 2.0, 3.0], device=device)

    def pushed(**options: Any) -> tuple[Tensor, Tensor]:
        outcome = torch.func.jvp(lambda x: qsim.quantize(x, "e4m3", **options), (x,), (tangent,))
        return outcome[0], outcome[1]

    value, moved = pushed()
    assert torch.equal(value, qsim.quantize(x, "e4m3"))
    assert torch.equal(moved, tangent)
    assert pushed(clip_gradient=True)[1].tolist() == [1, 2, 0]
    assert same(pushed(dtype=torch.bfloat16)[1], tangent.bfloat16())


def test_forward_over_reverse(device: torch.device) -> None:
    x = torch.tensor([0.5, -1.75, 2.0], device=device)
    hessian = torch.func.hessian(lambda x: (qsim.quantize(x, "e4m3") * x**2).sum())(x)
    assert torch.equal(hessian, torch.diag(6 * x))


def test_threshold_quantize_too(x: Tensor) -> None:
    leaf = x.nan_to_num(0, 1, -1).requires_grad_()
    qsim.functional.threshold_quantize(leaf, 0.25, 0.5).backward(torch.full_like(leaf, 3.0))
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full_like(leaf, 3.0))


def test_none_where_none_is_wanted(x: Tensor) -> None:
    assert not qsim.quantize(x, "e4m3").requires_grad
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        assert not qsim.quantize(leaf, "e4m3").requires_grad
    with torch.inference_mode():
        assert torch.equal(raw(qsim.quantize(leaf, "e4m3")), raw(qsim.quantize(x, "e4m3")))
    assert not qsim.encode(leaf, "e4m3").requires_grad


def test_refused_where_it_would_be_lost(x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"quantize_: x requires a gradient; use quantize"):
        qsim.quantize_(leaf, "e4m3")
    with pytest.raises(ValueError, match=r"out= gives no gradients"):
        qsim.quantize(leaf, "e4m3", out=torch.empty_like(x))
    with pytest.raises(ValueError, match=r"out= gives no gradients"):
        qsim.quantize(x, "e4m3", out=leaf)
    assert same(leaf.detach(), x)


def test_in_place_write_is_seen_by_autograd(device: torch.device) -> None:
    # Tensors saved for the backward pass must not change unnoticed.
    leaf = torch.tensor([1.1, 2.2], device=device, requires_grad=True)
    kept = leaf.exp()
    with torch.no_grad():
        qsim.quantize_(kept, FP16)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
