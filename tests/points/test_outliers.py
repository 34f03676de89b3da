"""Outliers: the quantiles, the two parts, their products and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qsim
from qsim.points import LSQ, Outliers
from support.comparing import same_bits


def with_outliers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, every fiftieth of which is a hundred times larger."""
    x = torch.randn(shape, dtype=dtype)
    x.view(-1)[::50] *= 100
    return x


@pytest.mark.parametrize("quantile", [0.97, 0.99, 0.999])
@pytest.mark.parametrize("shape", [(1000,), (17, 31), (1,), ()])
def test_clamps_to_two_elements_of_the_sorted_tensor(quantile: float, shape: tuple[int, ...]) -> None:
    x = with_outliers(*shape)
    clamped, rest = Outliers("e2m1", quantile).split(x)
    numbers = sorted(x.flatten().tolist())
    low, high = (numbers[min(int(part * len(numbers)), len(numbers) - 1)] for part in (1 - quantile, quantile))
    assert torch.equal(clamped, x.clamp(low, high))
    assert torch.equal(rest, x - x.clamp(low, high))
    assert (rest != 0).sum() <= 2 * (1 - quantile) * x.numel() + 1


def test_one_product_of_the_sum_is_two_products_of_the_parts() -> None:
    x, w = with_outliers(64, 40), torch.randn(40, 8, dtype=torch.float64)
    point = qsim.Quantizer("e2m1", scale=qsim.scaling.PerAxis(0))
    outliers = Outliers(point, quantile=0.97)
    clamped, rest = outliers.split(x)
    torch.testing.assert_close(outliers(x) @ w, point(clamped) @ w + rest @ w)
    assert (outliers(x) - x).norm() < (point(x) - x).norm() / 3


def test_the_gradient_of_clamped_values_is_1_and_that_of_others_the_points() -> None:
    x, upstream = with_outliers(1000).requires_grad_(), torch.randn(1000, dtype=torch.float64)
    outliers = Outliers(LSQ("int4", step=0.01))
    outliers(x).backward(upstream)
    clamped, rest = outliers.split(x.detach())
    inside = clamped.clone().requires_grad_()
    LSQ("int4", step=0.01)(inside).backward(upstream)
    assert inside.grad is not None
    assert same_bits(x.grad, torch.where(rest == 0, inside.grad, upstream))  # type: ignore[arg-type]
    assert (x.grad == 0).any()  # type: ignore[union-attr]
    assert outliers.point.change.grad is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Outliers("e2m1", quantile=0.5), "Outliers: quantile must be greater than 0.5 and less than 1, got 0.5"),
        (lambda: Outliers("e2m1", quantile=1.0), "Outliers: quantile must be greater than 0.5 and less than 1, got 1.0"),
        (lambda: Outliers(None), "Outliers: a format or a qsim.Quantizer is needed, got None"),
        (lambda: Outliers("e2m1").split(torch.ones(2).int()), "Outliers: x must be float32"),
    ],
)
def test_errors_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()  # type: ignore[operator]
