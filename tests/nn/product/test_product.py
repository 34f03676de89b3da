"""The product compared with one written out: operands rounded separately, multiplied in float64, gradients from torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from qsim import FivePoint
from qsim.nn.product.arithmetic import Arithmetic
from qsim.nn.product.bilinear import LinearProduct, MatmulProduct
from support.comparing import same_bits
from support.written_out import (
    CASES,
    DTYPES,
    POINTS,
    ProductCase,
    ProductSetting,
    check,
    convolution,
    five_point_product,
    gradient,
    linear,
    noisy,
    operands,
    run,
)

pytestmark = pytest.mark.usefixtures("plain_arithmetic")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("case", ["linear, three dimensions", "matmul, broadcast", "conv2d, everything"])
def test_every_point(device: torch.device, case: str, points: FivePoint, dtype: torch.dtype) -> None:
    check(CASES[case], points, operands(CASES[case], dtype, device))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("points", [POINTS[name] for name in ("all", "wide", "recipe")], ids=["all", "wide", "recipe"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_product(device: torch.device, case: ProductCase, points: FivePoint, dtype: torch.dtype) -> None:
    check(case, points, operands(case, dtype, device))


@pytest.mark.parametrize("points", [POINTS[name] for name in ("all", "wide", "same", "clipped")], ids=["all", "wide", "same", "clipped"])
def test_strides_do_not_matter(device: torch.device, points: FivePoint) -> None:
    a = torch.randn(7, 5, 3, device=device).permute(2, 1, 0)
    w = torch.randn(7, 6, device=device).t()
    bias = torch.randn(12, device=device)[::2]
    expanded = torch.randn(1, 7, device=device).expand(3, 5, 7)
    g = torch.randn(6, 5, 3, device=device).permute(2, 1, 0)
    ones = torch.ones((), device=device).expand(3, 5, 6)
    for rows, upstream in ((a, g), (expanded, g), (a, ones)):
        check(linear(3, 5, 7), points, tuple(x.detach().requires_grad_() for x in (rows, w, bias)), upstream)
    image = torch.randn(3, 4, 8, 7, device=device).to(memory_format=torch.channels_last)
    kernel = torch.randn(6, 4, 3, 3, device=device).transpose(2, 3)
    check(convolution(2), points, tuple(x.detach().requires_grad_() for x in (image, kernel, bias)))


@pytest.mark.parametrize("needing", range(8))
def test_gradients_are_those_asked_for(device: torch.device, needing: int) -> None:
    case, points = linear(5, 7), POINTS["all"]
    given = operands(case, torch.float32, device)
    torch.manual_seed(1)
    everything = run(case, points, given)
    some = [x.detach().requires_grad_(bool(needing >> i & 1)) for i, x in enumerate(given)]
    torch.manual_seed(1)
    y = five_point_product(*some, ProductSetting(points, LinearProduct()))  # type: ignore[arg-type]
    assert same_bits(y, everything[0])
    assert y.requires_grad == bool(needing)
    if needing:
        y.backward(gradient(y))
    # Sums for the bias during rounding may have another order than without.
    for x, expected, agree in zip(some, everything[1:], (same_bits, same_bits, torch.allclose), strict=True):
        assert x.grad is None if not x.requires_grad else agree(x.grad, expected)  # type: ignore[arg-type]


def test_two_inputs_draw_apart(device: torch.device) -> None:
    x = torch.full((16, 16), 1.25, device=device, requires_grad=True)
    seen: list[Tensor] = []

    @dataclasses.dataclass(frozen=True)
    class Spy(MatmulProduct):
        def forward(self, a: Tensor, w: Tensor, bias: Tensor | None, how: Arithmetic) -> Tensor:
            seen.extend([a, w])
            return super().forward(a, w, bias, how)

        def grad_a(self, g: Tensor, w: Tensor, a_shape: torch.Size, how: Arithmetic) -> Tensor:
            seen.append(w)
            return super().grad_a(g, w, a_shape, how)

        def grad_w(self, g: Tensor, a: Tensor, w_shape: torch.Size, how: Arithmetic) -> Tensor:
            seen.append(a)
            return super().grad_w(g, a, w_shape, how)

    five_point_product(x, x, None, ProductSetting(FivePoint(noisy("e2m1"), None, act_bwd=noisy("e2m1")), Spy(), True)).sum().backward()
    assert len(seen) == 4
    assert all(set(s.unique().tolist()) == {1.0, 1.5} for s in seen)
    assert all(not torch.equal(s, t) for i, s in enumerate(seen) for t in seen[:i]), "four roundings of one tensor, four draws"


def test_not_a_number_stays_one(device: torch.device) -> None:
    a = torch.randn(5, 7, device=device)
    a[2, 3] = torch.nan
    a.requires_grad_()
    w = torch.randn(6, 7, device=device, requires_grad=True)
    y, grad_a, _ = run(linear(5, 7, bias=None), POINTS["nearest"], (a, w))
    assert y.isnan().any(1).tolist() == [False, False, True, False, False]
    assert not grad_a.isnan().any()
